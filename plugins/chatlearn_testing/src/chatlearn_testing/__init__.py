"""The conformance kit: what a plugin's author tests a backend with, and what a user trusts when it passes.

A suite is a class of pytest tests for one kind of backend. A plugin subclasses it in its own tests; this is all of it::

    import pytest
    from chatlearn_testing.suites import GeneratorConformance
    from chatlearn_hf.tiny import build_tiny_model


    @pytest.fixture(scope="module")
    def model_directory(tmp_path_factory):
        return build_tiny_model(tmp_path_factory.mktemp("model") / "qwen3", "qwen3", initializer_range=0.2)


    class TestAcme(GeneratorConformance):
        backend = "acme"  # the name that the plugin registers
        load_reference = "chatlearn_hf.plain_forward:load_plain_model"

``TrainerConformance`` is used the same way, ``WeightSyncConformance`` needs ``backend`` only, and ``RewardConformance``
needs ``cases``: samples with the value each must get, or ``value=None`` for one that must end in an error::

    class TestAcmeReward(RewardConformance):
        backend = "acme"
        cases = (RewardCase("4", 1.0, ground_truth="4"), RewardCase("5", 0.0, ground_truth="4"))

What a backend must be able to do follows from its **record**: a generator that declares ``resumable`` is tested for
it. The only way to leave a test out is to declare less, which ``chatlearn plugins list`` shows. A subclass may set what
the suite names in ``settable`` (``options`` for one) and add tests; where it overrides a contract test, or hides one
behind ``skip`` or ``xfail``, collecting it is an error.

When a test fails, its docstring says what the rule is and what usually broke it; it is printed with the failure.

Rooms: ``suites`` (one a kind), ``fakes`` (in-memory backends with records, which pass them), ``check`` (run suites
on records without a test file), ``guard`` (what a subclass may touch), ``pytest_plugin`` (loaded by every pytest
run; imports nothing heavy), ``fake_environment`` (distributions that a test installs), ``scaffold`` and ``template``
(packages to begin with), ``cli`` (``chatlearn plugins new`` and ``check``).
"""
