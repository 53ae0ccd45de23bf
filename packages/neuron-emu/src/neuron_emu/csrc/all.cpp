// One translation unit: PyTorch's headers take longer to read than all of this takes to compile.
#include "state.cpp"
#include "memory.cpp"
#include "device.cpp"
#include "kernels.cpp"
#include "attention.cpp"
#include "autocast.cpp"
#include "collectives.cpp"
#include "bindings.cpp"
