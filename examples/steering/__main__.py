"""Run every example: python -m examples.steering"""

from examples.steering import all_casts, boxes_in_float32, decorators, overrides, softmax_layers

for example in (softmax_layers, all_casts, boxes_in_float32, decorators, overrides):
    print(f"\n--- {(example.__doc__ or '').splitlines()[0]}")
    example.main()
