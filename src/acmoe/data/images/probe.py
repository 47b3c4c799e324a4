"""Find unreadable images before a long job needs them."""

from concurrent.futures import ThreadPoolExecutor

from acmoe.data.images.splits import ImageSet, Indices

DECODED = 1_000  # images; 224 px JPEGs take some 5 s in one thread


def probe_images(images: ImageSet, indices: Indices, *, threads: int) -> None:
    """Raise a UserError that names an image of these indices if it cannot be read.

    The first 1,000 images are decoded. Of the others, only the beginning of each file is read: that
    finds files that are missing, empty or no images, but not those that were cut off.
    """
    whole, rest = indices[:DECODED].tolist(), indices[DECODED:].tolist()

    def check(index: int) -> None:
        images.pixels(index)

    with ThreadPoolExecutor(threads, thread_name_prefix="images") as pool:
        for _ in pool.map(check, whole):
            pass
        for _ in pool.map(images.probe, rest):
            pass
