"""What `slattn doctor`, `check` and `bench` do: a module each, with add_arguments(parser) and main(args) -> status."""
