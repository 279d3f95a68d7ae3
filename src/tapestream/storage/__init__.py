"""Where bytes live: memory of the device, of the host, and files; who owns them and how much there is."""

from tapestream.storage.disk import DiskFolder, Extent
from tapestream.storage.layout import Layout
from tapestream.storage.pool import Pool
from tapestream.storage.regions import Region

__all__ = ["DiskFolder", "Extent", "Layout", "Pool", "Region"]
