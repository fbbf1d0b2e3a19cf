"""The template's logger with one fault each, and the contract test that must fail."""

from __future__ import annotations

from source_mutants import SourceMutant

LOGGED = "test_odd_metrics_are_taken"
UNCHANGED = "test_metrics_and_configuration_are_read_only"
TWICE = "test_closing_twice_is_one_closing"
NOTHING = "test_nothing_is_left"
IS_LOGGER = "test_is_a_logger"
START = "host, port = self.options.host, self.options.port"
LOG = 'assert self._socket is not None, "start was not called"'
CLOSE = "if self._socket is not None:\n            self._socket.close()\n            self._socket = None"


def _logger(name: str, caught_by: str, old: str, new: str) -> SourceMutant:
    return SourceMutant("logger", name, "logger.py", old, new, caught_by)


MUTANTS = (
    _logger("refuses_nan", LOGGED, LOG, f"{LOG}\n        assert not any(math.isnan(v) for v in metrics.values())"),
    _logger(
        "whole_numbers_of_infinity",
        LOGGED,
        "if math.isfinite(value):",
        "if int(value) == value or math.isfinite(value):",
    ),
    _logger("ascii_names", LOGGED, LOG, f"{LOG}\n        [name.encode('ascii') for name in metrics]"),
    _logger("long_names_are_refused", LOGGED, LOG, f"{LOG}\n        assert all(len(name) < 200 for name in metrics)"),
    _logger("empty_steps_are_refused", LOGGED, LOG, f"{LOG}\n        max(metrics.values())"),
    _logger("the_metrics_are_changed", UNCHANGED, LOG, f"{LOG}\n        metrics['step'] = step"),
    _logger("the_configuration_is_changed", UNCHANGED, START, f"{START}; config.pop('train')"),
    _logger("the_configuration_is_changed_inside", UNCHANGED, START, f"{START}; config['train']['steps'] = 0"),
    _logger("closing_twice_fails", TWICE, CLOSE, "self._socket.close()\n        self._socket = None"),
    _logger("closing_needs_a_step", TWICE, CLOSE, f"self._stepped\n        {CLOSE}"),
    _logger("closing_unstarted_fails", IS_LOGGER, CLOSE, f"self._address\n        {CLOSE}"),
    _logger(
        "a_thread_stays",
        NOTHING,
        START,
        f"{START}; threading.Thread(target=time.sleep, args=(30,), daemon=True).start()",
    ),
    _logger("a_process_stays", NOTHING, START, f"{START}; subprocess.Popen(['sleep', '30'])"),
    _logger("a_file_elsewhere", NOTHING, START, f"{START}; Path(tempfile.mkdtemp(), 'acme.log').write_text('')"),
    _logger("seeds_random_too", NOTHING, START, f"{START}; random.seed(0)"),
    _logger("changes_the_directory", NOTHING, START, f"{START}; os.chdir('/')"),
    _logger("changes_the_environment", NOTHING, START, f"{START}; os.environ['ACME'] = host"),
)
