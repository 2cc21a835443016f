"""Import stand-ins that let SGLang start on a machine without a GPU.

SGLang imports `torchvision` and `sgl_kernel` at module top even where a text model on the CPU never calls them. A
finder at the end of `sys.meta_path` hands out empty modules for these two names, so a really installed package wins.
Anything that is in fact called raises NotImplementedError with its own name: nothing is silently wrong.
"""

import importlib.abc
import importlib.machinery
import sys
import types

STOOD_IN = ("torchvision", "sgl_kernel")


class _MissingFunction:
    """A callable that exists for `from x import f` and says its name when it is called."""

    def __init__(self, path):
        self.__name__ = self.__qualname__ = path

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"{self.__name__} is an import stand-in of tools/sglang; it needs the real package")

    def __getattr__(self, name):
        return _member(self.__name__, name)


class _MissingClass(type):
    """A class whose attributes exist (enum members used in signatures) and which can be subclassed."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


def _member(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    if name[0].isupper():
        return _MissingClass(name, (), {"__module__": owner})
    return _MissingFunction(f"{owner}.{name}")


class _StandIn(types.ModuleType):
    __path__ = ()
    __version__ = "0.0.0+standin"

    def __getattr__(self, name):
        return _member(self.__name__, name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.partition(".")[0] in STOOD_IN:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        """Nothing to run: the module answers every name by itself."""


sys.meta_path.append(_Finder())
