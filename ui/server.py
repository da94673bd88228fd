"""The page as a server, on this machine only unless told otherwise."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..common.console import console
from ..common.errors import LuthierError, missing_extra
from .guard import Guard
from .jobs import TOKEN, Jobs
from .place import Place, inside

LOCAL = ("127.0.0.1", "localhost", "[::1]")


def application(place: Place, token: str, hosts: Iterable[str]) -> Guard:
    """The page behind its guard.

    Args:
        hosts: `name:port` under which browsers may reach it.

    Raises:
        LuthierError: Gradio is not installed.
    """
    os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")
    try:
        import gradio as gr
    except ModuleNotFoundError as error:
        raise missing_extra("gradio", "ui") from error
    from fastapi import FastAPI
    from fastapi.responses import FileResponse, PlainTextResponse

    from .compare_tab import compare_tab
    from .recipe_tab import recipe_tab
    from .runs_tab import runs_tab

    jobs = Jobs(place)
    with gr.Blocks(title="Luthier", analytics_enabled=False) as blocks:
        gr.Markdown(f"# Luthier\n`{place.folder}`")
        with gr.Tab("recipe"):
            recipe_tab(place, jobs)
        with gr.Tab("runs") as runs:
            runs_tab(place, jobs, runs)
        with gr.Tab("compare") as compare:
            compare_tab(place, compare)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/files/{name:path}")
    def file(name: str) -> Any:
        """A report; as a page of another origin, so that nothing in it can use the page's token."""
        try:
            found = inside(place.own, name)
        except LuthierError as error:
            return PlainTextResponse(str(error), 403)
        if found.suffix != ".html" or not found.is_file():
            return PlainTextResponse("no such file", 404)
        return FileResponse(found, headers={"Content-Security-Policy": "sandbox allow-scripts allow-popups"})

    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])  # nothing from elsewhere
    css = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    mounted = gr.mount_gradio_app(app, blocks, path="/", ssr_mode=False, footer_links=[], theme=theme, css=css)
    return Guard(mounted, token, hosts)


def serve(folder: Path, host: str, port: int, names: Iterable[str] = ()) -> None:
    """Serve the page until it is interrupted.

    Args:
        folder: what it works in; relative paths of recipes are meant from there.
        host: address to listen on.
        port: which has to be free.
        names: further names that browsers may use, for addresses other than this machine's own.
    """
    place = Place(folder)
    os.chdir(place.folder)
    token = os.environ.get(TOKEN) or secrets.token_urlsafe(24)
    address = host.strip("[]")
    own = f"[{address}]" if ":" in address else address  # as browsers write it
    app = application(place, token, [f"{name}:{port}" for name in (*LOCAL, own, *names)])
    import uvicorn

    console.print(f"http://{own}:{port}/?token={token}", highlight=False, soft_wrap=True)
    uvicorn.run(app, host=address, port=port, log_level="warning")
