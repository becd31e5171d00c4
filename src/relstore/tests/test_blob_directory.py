"""Blobs in a directory that all processes share: nothing is visible before it is placed, or after it failed."""
import errno
import fcntl
import os
import random
import resource
import signal
import stat
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from ZODB.blob import FilesystemHelper, set_not_writable
from ZODB.POSException import StorageError
from ZODB.utils import p64

from relstore.blobs import temporary
from relstore.blobs.directory import SharedDirectory
from relstore.errors import ConfigurationError
from relstore.tests.support.blobfiles import Directory, Worker, content
from relstore.tests.support.children import in_child
from relstore.tests.support.layers import Processes

MAX = 2 ** 63 - 1


class Shared(Directory):

    def shared(self) -> SharedDirectory:
        shared = SharedDirectory(str(self.directory))
        self.addCleanup(shared.close)
        return shared

    def staged(self, shared: SharedDirectory, *oids: int) -> dict[int, str]:
        return {oid: shared.stage(oid, self.file(content(oid, 100))) for oid in oids}

    def store(self, shared: SharedDirectory, tid: int, *oids: int) -> None:
        shared.place(self.staged(shared, *oids), tid)

    def visible(self) -> set[str]:
        """Return what there is besides temporary files: also directories."""
        return {str(path.relative_to(self.directory)) for path in self.directory.rglob('*')
                if path.name != '.layout' and not {'tmp', '.relstore'} & set(path.relative_to(self.directory).parts)}


class OneProcess(Shared):

    def test_what_was_placed_is_found(self):
        shared = self.shared()
        staged = self.staged(shared, 1, 2)
        self.assertEqual(self.visible(), set())
        self.assertEqual((shared.find(1, 5), list(shared.files())), (None, []))
        shared.place(staged, 5)
        for oid in 1, 2:
            self.assertEqual(shared.find(oid, 5), shared.path(oid, 5))
            self.assertEqual(Path(shared.path(oid, 5)).read_bytes(), content(oid, 100))
        self.assertIsNone(shared.find(1, 4))
        self.assertEqual(self.temporary(), [])

    def test_it_is_where_zodb_looks(self):
        rnd = random.Random(1)
        for layout in 'bushy', 'lawn':
            self.directory = self.parent / layout
            zodb = FilesystemHelper(str(self.directory), layout)
            zodb.create()
            shared = self.shared()
            expected = []
            for oid in (0, 1, MAX, *(rnd.randrange(MAX) for _ in range(20))):
                tid = rnd.randrange(MAX)
                self.store(shared, tid, oid)
                path = zodb.getBlobFilename(p64(oid), p64(tid))
                self.assertEqual(shared.find(oid, tid), path)
                self.assertTrue(os.path.exists(path))
                expected.append((oid, tid, path, 100, os.stat(path).st_mtime))
            with self.subTest(layout):
                self.assertEqual(sorted(shared.files()), sorted(expected))
                for oid, tid, *_ in expected:
                    shared.remove(oid, tid)
                self.assertEqual(self.visible(), set())

    def test_what_zodb_has_stored_is_served(self):
        for layout in 'bushy', 'lawn':
            self.directory = self.parent / layout
            zodb = FilesystemHelper(str(self.directory), layout)
            zodb.create()
            if layout == 'lawn':
                (self.directory / '.layout').unlink()       # as it was before there were others
            zodb.getPathForOID(p64(7), create=True)
            path = zodb.getBlobFilename(p64(7), p64(9))
            Path(path).write_bytes(b'theirs')
            with self.subTest(layout):
                self.assertEqual(self.shared().find(7, 9), path)
                self.assertEqual((self.directory / '.layout').read_text(), layout)

    def test_a_new_directory(self):
        self.shared()
        self.assertEqual((self.directory / '.layout').read_text(), 'bushy')
        self.assertEqual(FilesystemHelper(str(self.directory)).layout_name, 'bushy')
        self.shared()

    def test_what_else_lies_there_is_not_a_blob(self):
        shared = self.shared()
        self.store(shared, 5, 1)
        directory = Path(shared.path(1, 5)).parent
        for name in '0x06.tmp', 'x.blob', '0x6.blob', '0x.blob', '0x06.blob.old':
            (directory / name).write_text('x')
        (directory / '0x0a.blob').mkdir()
        (directory.parent / '0x06.blob').write_text('x')
        (self.directory / 'notes').mkdir()
        self.assertEqual([row[:2] for row in shared.files()], [(1, 5)])

    def test_a_cache_is_refused(self):
        self.directory.mkdir()
        (self.directory / '.layout').write_text('zeocache')
        with mock.patch.dict('ZODB.blob.LAYOUTS'):
            for known in False, True:
                if known:       # ZEO was imported
                    from ZODB.blob import LAYOUTS
                    LAYOUTS['zeocache'] = LAYOUTS['bushy']
                with self.assertRaisesRegex(ConfigurationError, 'zeocache.*shared-blob-dir is false'):
                    self.shared()
        self.assertEqual(os.listdir(self.directory), ['.layout'])

    def test_two_make_it_at_once(self):
        """The other comes in any moment."""
        for name in 'makedirs', 'replace':
            for number in range(1, 100):
                self.directory = self.parent / f'{name}{number}'
                call, calls, others = getattr(os, name), [], []

                def both(*args, call=call, calls=calls, others=others, number=number, **how):
                    calls.append(args)
                    if len(calls) == number:
                        others.append(SharedDirectory(str(self.directory)))
                    return call(*args, **how)
                with self.subTest(name, number=number), mock.patch.object(os, name, both):
                    self.shared()
                self.assertEqual((self.directory / '.layout').read_text(), 'bushy')
                if not others:
                    break
            self.assertGreater(number, 1)

    def test_removed_or_discarded(self):
        shared = self.shared()
        self.store(shared, 5, 1, 2)
        for oid in 1, 2, 3:
            shared.remove(oid, 5)
        self.assertEqual(self.visible(), set())
        staged = self.staged(shared, 1, 2)
        os.unlink(staged[1])
        shared.discard(staged)
        shared.discard(staged)
        self.assertEqual((self.temporary(), self.visible()), ([], set()))

    def test_only_one_revision_is_removed(self):
        shared = self.shared()
        self.store(shared, 5, 1, 2)
        self.store(shared, 6, 1)
        shared.remove(1, 5)
        shared.remove(1, 5)
        self.assertEqual({row[:2] for row in shared.files()}, {(1, 6), (2, 5)})
        shared.remove(1, 6)
        self.assertFalse(os.path.exists(os.path.dirname(shared.path(1, 6))))
        self.assertEqual({row[:2] for row in shared.files()}, {(2, 5)})
        shared.remove(2, 5)
        self.assertEqual(self.visible(), set())

    def test_modes_are_those_of_zodb(self):
        shared = self.shared()
        for directory in 0o755, 0o750, 0o2770, 0o700:
            self.directory.chmod(directory)
            for file in 0o600, 0o644, 0o664:
                oid = directory * 1000 + file
                path = shared.path(oid, 5)
                os.makedirs(os.path.dirname(path))
                os.chmod(os.path.dirname(path), directory)
                source, zodb = self.file(b'x'), os.path.join(os.path.dirname(path), 'zodb')
                Path(zodb).touch()
                os.chmod(source, file), os.chmod(zodb, file)
                shared.place({oid: shared.stage(oid, source)}, 5)
                set_not_writable(zodb)
                with self.subTest(directory=oct(directory), file=oct(file)):
                    self.assertEqual(stat.S_IMODE(os.stat(path).st_mode), stat.S_IMODE(os.stat(zodb).st_mode))

    def test_it_survives_a_power_cut(self):
        """The file when it is staged; the directories above it, from it upwards, when it is placed."""
        shared = self.shared()
        synced, fsync = [], os.fsync

        def note(descriptor):
            synced.append(os.readlink(f'/proc/self/fd/{descriptor}'))
            fsync(descriptor)
        with mock.patch.object(os, 'fsync', note):
            staged = self.staged(shared, 1)
            self.assertEqual(synced, [staged[1]])
            shared.place(staged, 5)
        above = [str(path) for path in Path(shared.path(1, 5)).parents]
        self.assertEqual(synced[1:], above[:above.index(str(self.directory)) + 1])

    def test_from_another_file_system(self):
        shared, replace = self.shared(), os.replace

        def elsewhere(source, target):
            if os.path.dirname(source) == str(self.parent):
                raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))
            replace(source, target)
        with mock.patch.object(os, 'replace', elsewhere):
            source = self.file(b'data')
            staged = shared.stage(1, source)
            self.assertEqual((Path(staged).read_bytes(), os.path.exists(source)), (b'data', False))
            source = self.file(b'data')
            with mock.patch('shutil.copyfile', side_effect=_half), self.assertRaisesRegex(StorageError, 'No space'):
                shared.stage(2, source)
        self.assertTrue(os.path.exists(source))
        self.assertEqual([str(path) for path in self.temporary()], [staged])

    def test_it_cannot_be_written_to_the_disk(self):
        shared, source = self.shared(), self.file(b'data')
        with mock.patch.object(os, 'fsync', side_effect=OSError(errno.EIO, os.strerror(errno.EIO))), \
                self.assertRaisesRegex(StorageError, 'Input/output error'):
            shared.stage(1, source)
        self.assertEqual(Path(source).read_bytes(), b'data')
        self.assertEqual(self.temporary(), [])

    def test_no_source(self):
        with self.assertRaisesRegex(StorageError, 'The blob 0x1 cannot be stored in .*: No such file'):
            self.shared().stage(1, str(self.parent / 'nowhere'))

    def test_any_call_fails(self):
        """Of those that place several: nothing is visible, all are staged, and the next try succeeds."""
        shared = self.shared()
        self.store(shared, 4, 1, 200)
        before = self.visible()
        for name in 'replace', 'makedirs', 'chmod', 'fsync':
            for number in range(1, 100):
                staged = self.staged(shared, 1, 2, 300)
                made = getattr(os, name)
                calls = []

                def fail(*args, calls=calls, made=made, number=number, **how):
                    calls.append(args)
                    if len(calls) == number:
                        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
                    return made(*args, **how)
                with self.subTest(name, number=number), mock.patch.object(os, name, fail):
                    try:
                        shared.place(staged, 5)
                    except StorageError as e:
                        self.assertIn('quota', str(e))
                        self.assertLessEqual(self.visible() - before, _directories(self.visible()))
                        self.assertEqual(sorted(map(str, self.temporary())), sorted(staged.values()))
                        shared.place(staged, 5)
                    else:
                        self.assertGreater(number, 1)
                        break
                self.assertEqual(len(list(shared.files())), 5)
                for oid in staged:
                    shared.remove(oid, 5)
                self.assertEqual(self.visible(), before)
            for oid in staged:
                shared.remove(oid, 5)

    def test_what_was_there_stays_where_another_cannot_be_placed(self):
        """A storage may be copied into its own directory."""
        shared = self.shared()
        self.store(shared, 5, 1)
        staged = self.staged(shared, 1, 2)
        with mock.patch.object(shared, '_sync_directories', side_effect=OSError(errno.EIO, 'no')), \
                self.assertRaises(StorageError):
            shared.place(staged, 5)
        self.assertIsNotNone(shared.find(1, 5))
        self.assertIsNone(shared.find(2, 5))

    def test_a_staged_file_is_gone(self):
        shared = self.shared()
        staged = self.staged(shared, 1, 2)
        os.unlink(staged[2])
        with self.assertRaisesRegex(StorageError, 'The blob 0x2 cannot be stored'):
            shared.place(staged, 5)
        self.assertIsNone(shared.find(1, 5))
        self.assertTrue(os.path.exists(staged[1]))

    def test_what_a_commit_left_that_did_not_happen_is_replaced(self):
        shared = self.shared()
        self.store(shared, 5, 1)
        shared.place({1: shared.stage(1, self.file(b'again'))}, 5)
        self.assertEqual(Path(shared.path(1, 5)).read_bytes(), b'again')

    def test_a_pack_removes_the_directory_meanwhile(self):
        """In each moment between making it and renaming the file into it."""
        for moment in 'chmod', 'replace':
            shared = self.shared()
            staged = self.staged(shared, 1)
            self.store(shared, 4, 1)
            call, calls = getattr(os, moment), []

            def remove_first(*args, call=call, calls=calls, shared=shared):
                calls.append(args)
                if len(calls) == 1:
                    shared.remove(1, 4)
                return call(*args)
            with self.subTest(moment), mock.patch.object(os, moment, remove_first):
                shared.place(staged, 5)
            self.assertEqual(Path(shared.path(1, 5)).read_bytes(), content(1, 100))
            self.assertEqual(len(calls), 2)
            shared.remove(1, 5)

    def test_a_file_in_the_place_of_a_directory(self):
        shared = self.shared()
        staged = self.staged(shared, 1, 300)
        for directory in Path(shared.path(300, 5)).parent, Path(shared.path(300, 5)).parent.parent:
            if directory.is_dir():
                directory.rmdir()
            directory.parent.mkdir(parents=True, exist_ok=True)
            directory.touch()
            with self.assertRaisesRegex(StorageError, 'The blob 0x12c cannot be stored'):
                shared.place(staged, 5)
            self.assertEqual(sorted(map(str, self.temporary())), sorted(staged.values()))
            directory.unlink()
        shared.place(staged, 5)

    def test_what_goes_while_files_are_listed(self):
        shared = self.shared()
        self.store(shared, 5, *range(20))
        found = []
        for oid, tid, *_ in shared.files():
            found.append(oid)
            for other in range(20):
                shared.remove(other, tid)
        self.assertIn(len(found), range(1, 20))

    def test_what_cannot_be_read_is_not_left_out(self):
        """Else the blobs in it would be said to be missing."""
        shared = self.shared()
        self.store(shared, 5, 1)
        scandir = os.scandir

        def refuse(path):
            if os.fspath(path) == os.path.dirname(shared.path(1, 5)):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return scandir(path)
        with mock.patch.object(os, 'scandir', refuse), self.assertRaisesRegex(ConfigurationError, 'Permission denied'):
            list(shared.files())

    def test_debris(self):
        shared = self.shared()
        living = Path(self.staged(shared, 1)[1])
        dead, halfway = (self.directory / '.relstore' / name for name in ('relstore-1-x', 'relstore-2-x'))
        savepoint, uncommitted = (Path(shared.temporary_directory()) / name for name in ('savepoints', 'BUCabc'))
        for path in dead, halfway, savepoint:
            path.mkdir()
            (path / 'data').touch()
        (dead / '.lock').touch()
        uncommitted.touch()
        left = dead, halfway, savepoint, uncommitted
        shared.remove_debris(3600)
        self.assertTrue(all(path.exists() for path in (living, *left)))
        later = mock.patch.object(temporary, 'time', SimpleNamespace(time=lambda: time.time() + 7200))
        later.start()
        self.addCleanup(later.stop)
        with mock.patch.object(fcntl, 'flock', side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))):
            shared.remove_debris(3600)
        self.assertTrue(dead.exists())
        shared.remove_debris(3600)
        self.assertTrue(living.exists())
        self.assertEqual([path for path in left if path.exists()], [])

    def test_closed(self):
        shared = self.shared()
        shared.new_path(1)
        shared.close()
        self.assertEqual(os.listdir(self.directory / '.relstore'), [])
        staged = self.staged(shared, 1)
        shared.close()
        self.assertTrue(os.path.exists(staged[1]))      # somebody may be about to remove it

    def test_memory(self):
        """A large one is moved, or copied in pieces by the system."""
        shared = self.shared()
        path = self.file(b'')
        os.truncate(path, 1 << 30)

        def work():
            resource.setrlimit(resource.RLIMIT_AS, (_address_space() + (100 << 20),) * 2)
            shared.place({1: shared.stage(1, path)}, 5)
        in_child(self, work)
        self.assertEqual(os.stat(shared.path(1, 5)).st_size, 1 << 30)


class SeveralProcesses(Shared):
    layer = Processes

    def test_commits_and_packs_at_once(self):
        """In the same few directories: no commit fails, and what it has placed is there."""
        def work(rnd):
            shared, tid = SharedDirectory(str(self.directory)), 0
            while True:
                tid += 1
                mine = tid << 20 | os.getpid()
                oids = rnd.sample(range(250, 260), 3)
                staged = {}
                for oid in oids:
                    source = shared.new_path(oid)
                    Path(source).write_bytes(content(oid, 50))
                    staged[oid] = shared.stage(oid, source)
                shared.place(staged, mine)
                for oid in oids:
                    assert Path(shared.find(oid, mine)).read_bytes() == content(oid, 50)
                for _, _, _, size, _ in shared.files():
                    assert size == 50
                for oid in oids:
                    shared.remove(oid, mine)
                    assert shared.find(oid, mine) is None

        with mock.patch.object(os, 'fsync'):
            workers = [Worker(self, work, seed) for seed in range(4)]
        time.sleep(2)
        for worker in workers:
            worker.kill()
        shared = self.shared()
        for oid, tid, *_ in list(shared.files()):
            shared.remove(oid, tid)
        for path in sorted(self.visible(), reverse=True):     # of one that was killed before it came so far
            (self.directory / path).rmdir()

    def test_killed_with_files_staged(self):
        theirs, ours = os.pipe()

        def work(rnd):
            staged = self.staged(SharedDirectory(str(self.directory)), 1, 2)
            os.write(ours, staged[1].encode())
            signal.pause()
        worker = Worker(self, work, 0)
        staged = Path(os.read(theirs, 1000).decode())
        os.close(theirs), os.close(ours)
        shared = self.shared()
        later = mock.patch.object(temporary, 'time', SimpleNamespace(time=lambda: time.time() + 7200))
        later.start()
        self.addCleanup(later.stop)
        shared.remove_debris(3600)
        self.assertTrue(staged.exists())
        worker.kill()
        self.assertEqual(self.visible(), set())
        shared.remove_debris(3600)
        self.assertFalse(staged.parent.exists())

    def test_another_user_who_may_not_write(self):
        shared = self.shared()
        self.store(shared, 5, 1)
        staged, source = self.staged(shared, 2), self.file(b'data')
        before = self.visible()

        def work():
            for path in self.directory, *self.directory.rglob('*'):
                path.chmod(0o555 if path.is_dir() else 0o444)
            if os.geteuid() == 0:
                os.setuid(65534)
            for fails in (lambda: shared.stage(3, source), lambda: shared.place(staged, 6),
                          lambda: shared.remove(1, 5)):
                with self.assertRaisesRegex(ConfigurationError, 'Permission denied'):
                    fails()
            self.assertEqual(Path(shared.find(1, 5)).read_bytes(), content(1, 100))
            self.assertEqual([row[:2] for row in shared.files()], [(1, 5)])

        in_child(self, work)
        self.assertEqual(self.visible(), before)
        self.assertTrue(os.path.exists(source))
        self.assertTrue(os.path.exists(staged[2]))


def _half(source, target):
    Path(target).write_bytes(b'da')
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _directories(visible: set[str]) -> set[str]:
    return {name for name in visible if not name.endswith('.blob')}


def _address_space() -> int:
    return int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()
