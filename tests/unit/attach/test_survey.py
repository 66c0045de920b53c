"""What a switch reads of the host beside guests and links."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from attach_host import FakeAttachHost

from vsrtune.attach.survey import survey
from vsrtune.execute.journal import Journal
from vsrtune.host.filesystem import boot_id
from vsrtune.model.plan import Action
from vsrtune.model.targets import TxQueueLen


def test_a_new_device_gets_the_queue_from_before_vsrtune(tmp_path: Path) -> None:
    """Undo forgets the old device with the original. What somebody set since then stays."""
    host, path = FakeAttachHost(), tmp_path / "journal.jsonl"
    host.add("a", ("02:00:00:00:0a:00", "p0"))
    link = host.links()["macvtap0"]
    with Journal.open(path, boot_id()) as journal:
        target = TxQueueLen("a", link.name, link.index)
        journal.intent(Action(target, 500, 50, "policy"))
        journal.done(target)
        held = survey(host, (), path)
    free = survey(host, (), path)
    lengths = (50, 500, 70)
    for state in (held, free):
        kept = [state.kept(replace(link, queue=length)) for length in lengths]
        assert kept == [500, 500, 70]
    assert free.kept(replace(link, index=99, queue=50)) == 50
