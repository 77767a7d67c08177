"""What the scripts of this directory share: the cache, progress lines, ports, processes. Python's standard library only."""

import contextlib
import fcntl
import filecmp
import hashlib
import json
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
HELM_VERSION = "v4.3.2"

# --- progress and failure -------------------------------------------------------------------------------------------


class Failed(Exception):
    """A step that failed: what to say, and the log to read."""

    def __init__(self, message, log=None):
        super().__init__(message)
        self.log = log


def say(text):
    print(text, file=sys.stderr, flush=True)


def main(function):
    """Runs a script's main function; a failure becomes a few clear lines and exit code 1."""
    try:
        sys.exit(function(sys.argv[1:]))
    except Failed as failure:
        say(f"FAILED: {failure}")
        if failure.log and pathlib.Path(failure.log).exists():
            lines = pathlib.Path(failure.log).read_text(errors="replace").splitlines()[-12:]
            for line in lines:
                say(f"    | {line[:400]}")
            say(f"  its log: {failure.log}")
        sys.exit(1)
    except KeyboardInterrupt:
        say("interrupted")
        sys.exit(130)


@contextlib.contextmanager
def step(text):
    """One progress line with the time that the step took. What the step adds to the yielded list ends the line."""
    start, more = time.monotonic(), []
    yield more
    say(f"  {text}{''.join(f', {m}' for m in more)} ({time.monotonic() - start:.1f} s)")


def run_logged(what, command, log, **options):
    """Runs a long command with its output in a log, and shows every ten seconds that it's alive."""
    log = pathlib.Path(log)
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"  {what} ...")
    start = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, **options)
        while True:
            try:
                code = process.wait(10)
                break
            except subprocess.TimeoutExpired:
                lines = log.read_text(errors="replace").splitlines()
                say(f"    {time.monotonic() - start:4.0f} s, {len(lines)} lines: {lines[-1][:90] if lines else ''}")
            except BaseException:
                process.kill()
                raise
    if code != 0:
        raise Failed(f"{what}: {command[0]} ended with {code}", log)
    say(f"  {what}: done ({time.monotonic() - start:.1f} s)")


# --- programs -------------------------------------------------------------------------------------------------------


def need(program, install):
    if not shutil.which(program):
        raise Failed(f"{program} is missing; install it: {install}")


def apt_install(*packages):
    """Installs Debian packages, as root; anyone else is told the command."""
    command = f"apt-get install -y --no-install-recommends {' '.join(packages)}"
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise Failed(f"missing here: {' '.join(packages)}; install it: sudo {command}")
    env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
    run_logged("apt-get update", ["apt-get", "update"], cache() / "apt-update.log", env=env)
    run_logged(command, command.split(), cache() / "apt-install.log", env=env)


def cache():
    """Where big builds are kept, outside the tree, so that the next clone finds them."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    directory = pathlib.Path(os.environ.get("JOBREQUEST_CACHE") or os.path.join(home, "jobrequest")).absolute()
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def lock(path, waiting):
    """Holds a lock file; says what it waits for if another process has it. Children don't inherit it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"  {waiting}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build_once(directory, what, build):
    """Has build(new) fill a directory that gets its final name only when whole: an interrupted build is done again."""
    if directory.exists():
        return directory
    with lock(directory.with_name(directory.name + ".lock"), f"waiting for another build: {what}"):
        if not directory.exists():
            new = directory.with_name(directory.name + ".new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)
            build(new)
            new.rename(directory)
    return directory


def kubernetes_version():
    for line in (HERE / "go.mod").read_text().splitlines():
        words = line.replace("require", "").split()
        if len(words) == 2 and words[0] == "k8s.io/kubernetes":
            return words[1]
    raise Failed("go.mod doesn't name k8s.io/kubernetes")


def cluster_bin():
    """The directory with the cluster's programs, built if need be; one for each state of its sources."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in ("main.go", "go.mod", "go.sum")))
    version = kubernetes_version()

    def build(new):
        need("go", "apt-get install golang-go (1.26 or newer; see go.dev/dl)")
        # Charts and clients ask the API server for its version, so it's set as a release build sets it.
        flags = "-s -w"
        for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
            for name, value in {
                "gitVersion": version,
                "gitMajor": "1",
                "gitMinor": version.split(".")[1],
                "gitTreeState": "clean",
                "gitCommit": "0" * 40,
                "buildDate": "2026-01-01T00:00:00Z",
            }.items():
                flags += f" -X {package}.{name}={value}"
        run_logged(
            f"building Kubernetes {version} from Go modules (5 minutes or so, once)",
            ["nice", "go", "build", "-v", "-trimpath", "-ldflags", flags, "-o", str(new / "cluster"), "."],
            cache() / "build-kubernetes.log",
            cwd=HERE,
            env=dict(os.environ, CGO_ENABLED="0", GOWORK="off"),
        )
        for name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"):
            (new / name).symlink_to("cluster")

    return build_once(cache() / f"kubernetes-{version}-{digest.hexdigest()[:12]}", f"Kubernetes {version}", build)


def helm_directory():
    return cache() / f"helm-{HELM_VERSION}"


def helm_bin():
    """The directory with helm, built if need be."""
    major = HELM_VERSION.split(".")[0]

    def build(new):
        need("go", "apt-get install golang-go (1.26 or newer; see go.dev/dl)")
        flags = f"-s -w -X helm.sh/helm/{major}/internal/version.version={HELM_VERSION}"
        run_logged(
            f"building helm {HELM_VERSION} from Go modules (2 minutes or so, once)",
            ["nice", "go", "install", "-v", "-trimpath", "-ldflags", flags, f"helm.sh/helm/{major}/cmd/helm@{HELM_VERSION}"],
            cache() / "build-helm.log",
            cwd="/",
            env=dict(os.environ, CGO_ENABLED="0", GOBIN=str(new), GOWORK="off"),
        )

    return build_once(helm_directory(), f"helm {HELM_VERSION}", build)


def judges_bin():
    """The directory with tests/judges, which says what other people's programs make of a JobRequest."""
    sources = sorted(path for path in (ROOT / "tests" / "judges").iterdir() if path.suffix in (".go", ".mod", ".sum"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]

    def build(new):
        need("go", "apt-get install golang-go (1.26 or newer; see go.dev/dl)")
        command = ["nice", "go", "build", "-trimpath", "-o", str(new / "judges"), "."]
        env = dict(os.environ, CGO_ENABLED="0", GOWORK="off")
        run_logged("building kstatus and a Lua interpreter (a minute, once)", command, cache() / "build-judges.log", cwd=ROOT / "tests" / "judges", env=env)

    return build_once(cache() / f"judges-{digest}", "kstatus and a Lua interpreter", build)


# --- what judges the chart --------------------------------------------------------------------------------------------
# Programs and files of others, each as its makers publish it, in the cache; nothing is installed into the system.

KUBERNETES_VALIDATE = "kubernetes-validate==1.37.0"  # with the schemas of the last dozen versions of Kubernetes
CHECKOV = "checkov==3.3.30"
HELM_DOCS = "v1.14.2"
# Go modules that hold CRDs, and which of them the chart makes objects of.
CRDS = {
    "github.com/kedacore/keda/v2@v2.19.0": ("config/crd/bases/keda.sh_", "scaledobjects triggerauthentications"),
    "github.com/prometheus-operator/prometheus-operator@v0.85.0": (
        "example/prometheus-operator-crd/monitoring.coreos.com_",
        "podmonitors prometheusrules servicemonitors",
    ),
}


def helm_docs():
    """helm-docs, built if need be."""

    def build(new):
        need("go", "apt-get install golang-go (1.26 or newer; see go.dev/dl)")
        module = f"github.com/norwoodj/helm-docs/cmd/helm-docs@{HELM_DOCS}"
        run_logged(
            f"building helm-docs {HELM_DOCS} from Go modules (a minute or so, once)",
            ["nice", "go", "install", "-v", "-trimpath", "-ldflags", "-s -w", module],
            cache() / "build-helm-docs.log",
            cwd="/",
            env=dict(os.environ, CGO_ENABLED="0", GOBIN=str(new), GOWORK="off"),
        )

    return build_once(cache() / f"helm-docs-{HELM_DOCS}", f"helm-docs {HELM_DOCS}", build) / "helm-docs"


def python_packages(requirement):
    """The directory of a package from PyPI and what it needs, for PYTHONPATH."""

    def build(new):
        pip = [sys.executable, "-m", "pip"]
        if subprocess.run([*pip, "--version"], capture_output=True).returncode:
            apt_install("python3-pip")
        command = [*pip, "install", "--quiet", "--disable-pip-version-check", "--target", str(new), requirement]
        run_logged(f"pip install {requirement}", command, cache() / "pip.log")

    return build_once(cache() / requirement.replace("==", "-"), requirement, build)


def prometheus_bin():
    """The directory with prometheus and promtool: from Debian's package, without the service that it would install."""
    on_path = shutil.which("prometheus"), shutil.which("promtool")
    if all(on_path):
        return pathlib.Path(on_path[0]).parent

    def build(new):
        need("apt-get", "prometheus and promtool, on PATH")
        if os.geteuid() == 0:
            run_logged("apt-get update", ["apt-get", "update"], cache() / "apt-update.log")
        with tempfile.TemporaryDirectory() as package:
            run_logged("apt-get download prometheus", ["apt-get", "download", "prometheus"], cache() / "prometheus.log", cwd=package)
            (file,) = pathlib.Path(package).glob("*.deb")
            subprocess.run(["dpkg-deb", "--extract", str(file), package + "/whole"], check=True)
            for name in ("prometheus", "promtool"):
                shutil.copy2(f"{package}/whole/usr/bin/{name}", new)

    return build_once(cache() / "prometheus", "prometheus", build)


def others_crds():
    """The directory with the CRDs of what the chart makes objects for, if it is there: KEDA, the Prometheus operator."""
    names = hashlib.sha256(repr(CRDS).encode()).hexdigest()[:12]

    def build(new):
        need("go", "apt-get install golang-go (1.26 or newer; see go.dev/dl)")
        for module, (prefix, kinds) in CRDS.items():
            command = ["go", "mod", "download", "-json", module]
            done = subprocess.run(command, cwd="/", capture_output=True, text=True, env=dict(os.environ, GOWORK="off"))
            if done.returncode:
                raise Failed(f"{' '.join(command)}: {done.stdout}{done.stderr}")
            for kind in kinds.split():
                file = pathlib.Path(json.loads(done.stdout)["Dir"], f"{prefix}{kind}.yaml")
                (new / file.name).write_bytes(file.read_bytes())

    return build_once(cache() / f"crds-{names}", "CRDs of KEDA and the Prometheus operator", build)


def built_program(directory):
    """Builds the crate's program and puts a copy into DIR/bin, which no later build changes under a running system."""
    need("cargo", "curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh")
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    program = pathlib.Path(directory) / "bin" / "jobrequest"
    program.parent.mkdir(parents=True, exist_ok=True)
    seed_target()
    command = ("cargo", "build", "--locked", "--bin", "jobrequest")
    with step(" ".join(command)):
        if subprocess.run(command, cwd=ROOT).returncode:
            raise Failed(" ".join(command))
    save_target()
    built = target / "debug" / "jobrequest"
    if not program.exists() or not filecmp.cmp(built, program, shallow=False):
        new = program.with_name("jobrequest.new")
        shutil.copy2(built, new)
        new.rename(program)
    return program


# --- cargo's target directory ---------------------------------------------------------------------------------------
# Each clone has its own: in a shared one cargo takes one clone's program for another's (their hashes are the same, and
# it goes by the files' times). The built dependencies are kept in the cache, for the next clone to start from.


def seed_of_target():
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in ("Cargo.lock", "rust-toolchain.toml")))
    return cache() / f"dependencies-{digest.hexdigest()[:12]}"


def units(target):
    """What cargo has built in a target directory, without this crate itself."""
    return {p.relative_to(target) for p in pathlib.Path(target).glob("*/.fingerprint/*") if not p.name.startswith("jobrequest-")}


def seed_target():
    """Starts a new clone's target directory from what earlier clones built, as far as it fits (cargo sees to that)."""
    target = ROOT / "target"
    if target.exists() or "CARGO_TARGET_DIR" in os.environ:
        return
    with lock(cache() / "dependencies.lock", "waiting for another clone"):
        seeds = sorted(cache().glob("dependencies-*/"), key=lambda seed: (seed == seed_of_target(), seed.stat().st_mtime))
        if seeds:
            with step("dependencies that an earlier clone built"):
                new = target.with_name("target.new")
                shutil.rmtree(new, ignore_errors=True)
                # With the files' times: cargo compares them.
                subprocess.run(["cp", "-a", "--reflink=auto", str(seeds[-1]), str(new)], check=True)
                new.rename(target)


def save_target():
    """Keeps the built dependencies for the next clone, if there are more than last time."""
    target, seed = ROOT / "target", seed_of_target()
    if "CARGO_TARGET_DIR" in os.environ or len(units(target)) <= len(units(seed)):
        return
    with lock(cache() / "dependencies.lock", "waiting for another clone"), step("built dependencies kept for the next clone"):
        new = cache() / "dependencies.new"
        shutil.rmtree(new, ignore_errors=True)
        for profile in target.glob("*/.fingerprint"):
            profile = profile.parent
            copy = new / profile.name
            copy.mkdir(parents=True)
            for part in (".fingerprint", "build", "deps"):
                subprocess.run(["cp", "-a", "--reflink=auto", str(profile / part), str(copy)], check=True)
            for own in copy.glob(".fingerprint/jobrequest-*"):
                for path in [own, *copy.glob(f"*/*-{own.name.rpartition('-')[2]}*")]:
                    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        shutil.rmtree(seed, ignore_errors=True)
        new.rename(seed)
        for old in sorted(cache().glob("dependencies-*/"), key=lambda p: p.stat().st_mtime)[:-2]:
            shutil.rmtree(old, ignore_errors=True)


# --- processes ------------------------------------------------------------------------------------------------------


def command_line(pid):
    """A process's arguments; none for one that is gone or a zombie."""
    try:
        return pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def environment(pid):
    try:
        pairs = pathlib.Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)


def all_pids():
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def wait_until(true, seconds, every=0.05):
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(every)
    return True


class Part:
    """One process of a system in a directory: DIR/pids/NAME holds its pid, DIR/NAME.log its output.

    A pid file alone proves nothing (after a reboot its number may be another process's), so a process is ours when
    its command line shows our mark: an argument that no other directory's process has.
    """

    def __init__(self, directory, name, mark, stop_signal=signal.SIGTERM, grace=30):
        self.directory, self.name, self.mark = pathlib.Path(directory), name, mark
        self.stop_signal, self.grace = stop_signal, grace
        self.pid_file = self.directory / "pids" / name
        self.log = self.directory / f"{name}.log"

    def is_ours(self, pid):
        line = command_line(pid)
        return bool(line) and os.path.basename(line[0]) == self.name and self.mark in line

    def pid(self):
        """The pid if it runs. One without a pid file (someone removed it) is found by its mark."""
        try:
            pid = int(self.pid_file.read_text())
            if self.is_ours(pid):
                return pid
        except (OSError, ValueError):
            pass
        return next((pid for pid in all_pids() if self.is_ours(pid)), None)

    def same(self, pid, command, env):
        """Whether a running process is what start would start now; if not, it is restarted."""
        return command_line(pid) == [str(word) for word in command]

    def ensure(self, command, env=None, prefix=()):
        """Starts it unless it runs. Returns True if it was started."""
        pid = self.pid()
        if pid and not self.same(pid, command, env):
            say(f"  {self.name}: its program or its settings changed, restarting it")
            self.stop()
            pid = None
        if pid:
            os.kill(pid, signal.SIGCONT)  # in case somebody paused it
            self.pid_file.parent.mkdir(parents=True, exist_ok=True)
            self.pid_file.write_text(f"{pid}\n")
            return False
        self.pid_file.parent.mkdir(parents=True, exist_ok=True)
        if self.log.exists() and self.log.stat().st_size > 64 << 20:
            self.log.rename(self.log.with_suffix(".log.old"))
        with self.log.open("ab") as out:
            process = subprocess.Popen(
                [*prefix, *map(str, command)],
                env=env,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,  # Ctrl-C at the terminal isn't for it
            )
        self.pid_file.write_text(f"{process.pid}\n")
        self.process = process
        return True

    def wait_ready(self, ready, seconds=60):
        """Waits until ready() is true; fails at once if the process ends."""

        def done():
            process = getattr(self, "process", None)
            if process and process.poll() is not None:
                raise Failed(f"{self.name} ended with {process.returncode}", self.log)
            return ready()

        if not wait_until(done, seconds):
            raise Failed(f"{self.name} isn't ready after {seconds} s", self.log)

    def stop(self, with_signal=None):
        """Stops it and waits; kills it after the grace. Returns True if it ran."""
        pid, ran = self.pid(), False
        while pid:
            ran = True
            os.kill(pid, with_signal or self.stop_signal)
            os.kill(pid, signal.SIGCONT)
            if not wait_until(lambda: not self.is_ours(pid), self.grace):
                say(f"  {self.name} (pid {pid}) doesn't stop, killing it")
                os.kill(pid, signal.SIGKILL)
                if not wait_until(lambda: not self.is_ours(pid), 10):
                    raise Failed(f"{self.name} (pid {pid}) doesn't end", self.log)
            pid = self.pid()
        self.pid_file.unlink(missing_ok=True)
        return ran


# --- ports ----------------------------------------------------------------------------------------------------------


def port_is_free(port):
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
            return True
        except OSError:
            return False


class Ports:
    """The ports of a system: chosen free when first asked for, then remembered in DIR/ports.

    NAME_PORT in the environment (as in POSTGRES_PORT) decides the first choice.
    """

    def __init__(self, directory):
        self.file = pathlib.Path(directory) / "ports"
        self.ports = {}
        if self.file.exists():
            for line in self.file.read_text().splitlines():
                name, _, port = line.partition("=")
                self.ports[name] = int(port)

    def get(self, name, running=False):
        """The port of a part; another than last time if that isn't free now and the part doesn't run."""
        port = self.ports.get(name)
        if port and (running or port_is_free(port)):
            return port
        wish = os.environ.get(f"{name.upper().replace('-', '_')}_PORT")
        if port:
            say(f"  port {port} of {name} is taken by another process, choosing a new one")
        elif wish:
            port = int(wish)
            if not port_is_free(port):
                raise Failed(f"port {port} for {name} is taken")
        if not port or port == self.ports.get(name):
            # Below the range that the kernel gives to outgoing connections.
            used = set(self.ports.values())
            port = next(p for p in iter(lambda: random.randint(20000, 32000), None) if p not in used and port_is_free(p))
        self.ports[name] = port
        self.file.parent.mkdir(parents=True, exist_ok=True)
        new = self.file.with_suffix(".new")
        new.write_text("".join(f"{n}={p}\n" for n, p in sorted(self.ports.items())))
        new.rename(self.file)
        return port
