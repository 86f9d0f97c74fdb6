"""The images of a request, on the way from the server's process to the engine."""

import msgspec


class TileRun(msgspec.Struct, array_like=True):
    """A run of a prompt's tokens that stands for a tile: its rows are those tokens that are negative.

    Attributes:
        start, stop: range of tokens.
        file: index of the image in `ImagesAsk.files`.
        tile: index of the tile in its image.
        width: number of rows that show a line of the tile.
    """

    start: int
    stop: int
    file: int
    tile: int
    width: int = 1


class ImagesAsk(msgspec.Struct):
    """The images of a prompt.

    Attributes:
        files: the images as they were sent: PNG, JPEG and so on.
        runs: in the order of their places; none, in a message: the images are those of the request before it.
    """

    files: list[bytes] = []
    runs: list[TileRun] = []
