"""Operations in C++ for the CPU: one file per operation, each compiled for several instruction sets and dispatched at run time."""
