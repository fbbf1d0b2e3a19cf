"""In-memory fakes of the four kinds, on a bigram model: for unit tests of the core and of plugins.

Their records are in ``records``; ``bigram.build_bigram_model`` writes a model directory for them. They keep every rule
of the protocols (the conformance suites run on them), so a test that passes on a fake does not rely on an accident.
"""
