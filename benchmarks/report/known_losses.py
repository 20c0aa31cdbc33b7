"""Why we are slower where we are: patterns of "device stage case", and the cause found by profiling."""

CAUSES: dict[str, str] = {
    r"cpu growth \d+ weights": "weights of 16 x 16: to ask whether one was written since its cast takes 0.3 µs, "
    "to cast its 256 numbers takes less",
    r"cpu inference GPT 23M, 1x16": "frozen weights are constants that nobody may write again. To ask whether one of "
    "49 was written takes 0.1 ms of a call, and 0.2 ms more go to what that displaces in the processor's caches: "
    "with the question left out, ours is 1.03 times as fast. By block Dynamo and the question come ten times a call",
    r"cpu small .*: step": "the first call after an update proves which copies are out of date and casts them anew: "
    "70 µs for six small weights in the midst of a step, where the processor's caches hold other things. Cast in the "
    'graph, as with `weights="every_call"`, they take 3 to 20 µs',
    r"compile .* cold": 'our passes take 0.2 s; Inductor\'s code for roundings in registers (`numerics="eager"`) takes '
    "longer to compile than what it replaces",
    r"compile .* warm": "our passes take 0.2 s and run again in each process, before Inductor's caches are asked",
}
