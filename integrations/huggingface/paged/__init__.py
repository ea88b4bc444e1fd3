"""The way over devices with attention kernels: layers write blocks and attend over them, rows packed without padding.

In the order data flows: `requests` turns a batch into block tables and slots, `batch` brings them to the devices,
`packed` runs the model, `dispatch` sends a layer's attention to `layers`, which write and read the blocks; `graphs`
runs decode steps and captures those that can be.
"""
