"""`acmoe report RUN [RUN ...]`: write one HTML page that compares runs and shows their routing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

PORT = 8765


@dataclass(frozen=True, kw_only=True)
class Report:
    """Compare runs on one self-contained page: curves, routing, and how to read them."""

    folders: Annotated[
        tyro.conf.Positional[tuple[Path, ...]],
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint="(required)"),
    ]
    """Folders of runs, or folders that contain runs. All runs are compared with the first."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=("-o",))] = None
    """The file to write. If not given: report.html, inside the run's folder if there is one run."""
    serve: bool = False
    """Write no file; serve the page on this machine and refresh it while a run trains."""
    port: int | None = None
    """Port of --serve, 8765 if not given. 0 takes any free port."""
    tokens: int = 640
    """Number of tokens of text in the routing explorer."""
    device: str = "auto"
    """Device that computes the routing; auto takes a GPU if there is one."""

    def run(self) -> int:
        from acmoe.config.updates import check_device
        from acmoe.errors import check

        check(bool(self.folders), "no run given; say which, as in `acmoe report runs/demo`")
        check(self.tokens >= 8, f"--tokens {self.tokens} shows nothing; give at least 8")
        check_device(self.device)
        if self.serve:
            check(
                self.out is None,
                f"--out {self.out} with --serve, which writes no file; leave one of them out",
            )
            return self._serve()
        check(self.port is None, f"--port {self.port} is for --serve; leave it out, or add --serve")
        return self._write()

    def _write(self) -> int:
        from acmoe.data.progress import progress_bars
        from acmoe.errors import check
        from acmoe.report.page import write_report

        single = len(self.folders) == 1 and self.folders[0].is_dir()
        out = self.out or (self.folders[0] if single else Path()) / "report.html"
        check(not out.is_dir(), f"--out {out} is a folder; name a file in it, such as report.html")
        console = Console(stderr=True, soft_wrap=True, highlight=False, markup=False)
        with progress_bars(console) as progress:
            path, notes = write_report(
                self.folders, out, tokens=self.tokens, device=self.device, progress=progress
            )
        for note in notes:
            console.print(note)
        print(f"wrote {path}: open it in a browser")
        return 0

    def _serve(self) -> int:
        from acmoe.report.routing import RoutingReader
        from acmoe.report.serve import LiveReport, ReportServer

        report = LiveReport(self.folders, RoutingReader(tokens=self.tokens, device=self.device))
        with ReportServer(report, PORT if self.port is None else self.port) as server:
            try:
                count = len(report.folders)
                runs = "1 run" if count == 1 else f"{count} runs"
                print(f"{server.url} shows {runs}; ctrl-C ends it", flush=True)
                server.serve_forever()
            except KeyboardInterrupt:
                print("\nstopped")
        return 0
