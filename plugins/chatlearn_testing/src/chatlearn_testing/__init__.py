"""The conformance kit: tests that show whether a plugin's backend fulfils its contract.

A suite is a class of pytest tests for one kind of backend. A plugin subclasses it in its own tests; a complete test
file is::

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
needs ``cases``: samples with the expected value of each, or ``value=None`` for one that must yield an error::

    class TestAcmeReward(RewardConformance):
        backend = "acme"
        cases = (RewardCase("4", 1.0, ground_truth="4"), RewardCase("5", 0.0, ground_truth="4"))

The backend's **record** decides which tests apply: a generator that declares ``resumable`` is tested for resuming. The
only way to omit a test is to declare less, and ``chatlearn plugins list`` shows what a backend declares. A subclass may
set the attributes that the suite lists in ``settable`` (such as ``options``) and add tests. Overriding a contract test,
or marking the class ``skip`` or ``xfail``, is a collection error.

When a test fails, pytest also prints its docstring, which states the rule and the usual causes of a failure.

Modules: ``suites`` (one per kind), ``fakes`` (in-memory backends with records, which pass the suites), ``check`` (runs
suites on records without a test file), ``guard`` (checks what a subclass sets), ``pytest_plugin`` (loaded by every
pytest run; imports only light modules), ``fake_environment`` (distributions that a test installs), ``scaffold`` and
``template`` (templates for new packages), ``cli`` (``chatlearn plugins new`` and ``check``).
"""
