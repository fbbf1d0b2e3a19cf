"""The suite for loggers on TensorBoard's."""

from chatlearn_observe.conformance import tensorboard_scalars
from chatlearn_testing.suites import LoggerConformance


class TestTensorBoard(LoggerConformance):
    backend = "tensorboard"
    read_back = tensorboard_scalars
