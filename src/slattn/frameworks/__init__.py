"""slattn under other people's training frameworks: one module each, and one line to switch.

    import slattn.frameworks.nemo_automodel
    slattn.frameworks.nemo_automodel.patch()            # or: with slattn.frameworks.nemo_automodel.patch(): ...

Each `patch()` returns a `slattn.frameworks.handle.Patch`: it says what it replaced, and `undo()` puts that back.
What was run, on which version, and what is not supported is in docs/frameworks.md.
"""
