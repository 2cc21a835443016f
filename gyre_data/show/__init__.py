"""Text and JSON views of trees and counts."""
