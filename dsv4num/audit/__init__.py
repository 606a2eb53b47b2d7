"""What the compiler made of every kernel on every architecture, inspected without a GPU."""
