"""Runs compiled Triton kernels without a GPU: PTX in an emulator (`machine/`), on the memory of CPU tensors.

    ptx.py            text to statements
    instructions.py   statements to instructions of the machine (instructions_sm90.py: wgmma, mbarriers, TMA)
    registers.py      the register file they work on
    machine/          the machine, in C++: a warp is 32 lanes, a program its warps in random order between barriers
    program.py        a kernel ready to run, with counts of its instructions
    launch.py         one launch: what may be touched, and faults with the line of PTX and of the kernel's source
    arguments.py      a launch's arguments against what the kernel was compiled for
    driver.py         Triton's driver for it, over libcuda.c
    device.py         the package on top of it; as a pytest plugin: `pytest -p emulator.device`
    random_calls.py   calls of every operator drawn at random (random_attention.py, random_rows.py, random_memory.py)
    mutate.py         breaks kernels on purpose and counts what is noticed

docs/numerics.md says what is found and what only a GPU can show.
"""
