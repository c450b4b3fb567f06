"""Engine processes that this gateway starts and watches."""
