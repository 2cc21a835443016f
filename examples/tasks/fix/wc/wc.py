def count_lines(text: str) -> int:
    return text.count("\n")
