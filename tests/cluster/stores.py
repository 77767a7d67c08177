"""The stores: a Kubernetes control plane (etcd, kube-apiserver, kube-controller-manager) and Postgres in a directory, and
a pooler before Postgres for those who ask for one by name."""

import base64
import contextlib
import hashlib
import http.client
import json
import os
import pathlib
import pwd
import shlex
import shutil
import signal
import ssl
import subprocess

import lib
from lib import Failed, Part, Ports, step

KUBE = ["etcd", "kube-apiserver", "kube-controller-manager"]
ALL = [*KUBE, "postgres"]
POOLER = "pgbouncer"


class Stores:
    def __init__(self, directory):
        self.directory = d = pathlib.Path(directory).resolve()
        self.pki = d / "pki"
        self.kubeconfig = d / "kubeconfig"
        self.data = d / "postgres"
        self.parts = {
            "etcd": Part(d, "etcd", f"--data-dir={d}/etcd"),
            "kube-apiserver": Part(d, "kube-apiserver", f"--audit-log-path={d}/audit.log", grace=10),
            "kube-controller-manager": Part(d, "kube-controller-manager", f"--kubeconfig={d}/controller-manager.kubeconfig", grace=5),
            # SIGINT is Postgres' fast shutdown: it doesn't wait for its clients to leave.
            "postgres": Part(d, "postgres", f"--jobrequest.directory={d}", signal.SIGINT, grace=60),
            # SIGTERM is PgBouncer's immediate shutdown.
            POOLER: Part(d, POOLER, f"{d}/{POOLER}.ini", grace=5),
        }

    @property
    def database_url(self):
        return f"postgres://jobrequest@127.0.0.1:{Ports(self.directory).get('postgres', running=True)}/jobrequest"

    @property
    def pooler_url(self):
        return f"postgres://jobrequest@127.0.0.1:{Ports(self.directory).get(POOLER, running=True)}/jobrequest"

    def lock(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        return lib.lock(self.directory / "lock", f"waiting for another script that works in {self.directory}")

    # Starting goes in two halves, so that Postgres and etcd start while the other one is waited for.
    def up(self, names):
        d, part = self.directory, self.parts
        self.directory.mkdir(parents=True, exist_ok=True)
        self.ports = Ports(d)
        port = {name: self.ports.get(name, running=bool(part[name].pid())) for name in [*ALL, POOLER] if name in names or name in self.ports.ports}
        if set(names) & set(KUBE):
            programs = lib.cluster_bin()
            for name in KUBE:
                port.setdefault(name, self.ports.get(name, running=bool(part[name].pid())))
            peer = self.ports.get("etcd-peer", running=bool(part["etcd"].pid()))
            self.make_pki()
            for user in ("admin", "controller-manager"):
                self.write_kubeconfig(user, port["kube-apiserver"])
        waits = []
        if "etcd" in names:
            here, other = f"http://127.0.0.1:{port['etcd']}", f"http://127.0.0.1:{peer}"
            started = part["etcd"].ensure(
                [
                    programs / "etcd",
                    f"--data-dir={d}/etcd",
                    f"--listen-client-urls={here}",
                    f"--advertise-client-urls={here}",
                    f"--listen-peer-urls={other}",
                    f"--initial-advertise-peer-urls={other}",
                    f"--initial-cluster=default={other}",
                    "--quota-backend-bytes=8589934592",  # benchmarks fill it faster than it is compacted
                    "--log-level=warn",
                ]
            )
            waits.append(("etcd", started, lambda: http_ok(port["etcd"], "/health")))
        if "kube-apiserver" in names:
            started = part["kube-apiserver"].ensure(
                [
                    programs / "kube-apiserver",
                    f"--etcd-servers=http://127.0.0.1:{port['etcd']}",
                    "--bind-address=127.0.0.1",
                    "--advertise-address=127.0.0.1",
                    f"--secure-port={port['kube-apiserver']}",
                    f"--tls-cert-file={self.pki}/apiserver.crt",
                    f"--tls-private-key-file={self.pki}/apiserver.key",
                    f"--client-ca-file={self.pki}/ca.crt",
                    # There is no front proxy; without these the controller-manager complains all the time.
                    f"--requestheader-client-ca-file={self.pki}/ca.crt",
                    "--requestheader-allowed-names=front-proxy-client",
                    "--requestheader-username-headers=X-Remote-User",
                    "--requestheader-group-headers=X-Remote-Group",
                    "--requestheader-extra-headers-prefix=X-Remote-Extra-",
                    "--anonymous-auth=false",
                    "--authorization-mode=Node,RBAC",
                    "--enable-admission-plugins=NodeRestriction",
                    "--service-account-issuer=https://kubernetes.default.svc",
                    f"--service-account-key-file={self.pki}/sa.pub",
                    f"--service-account-signing-key-file={self.pki}/sa.key",
                    "--service-cluster-ip-range=10.96.0.0/16",
                    "--endpoint-reconciler-type=none",
                    f"--audit-policy-file={lib.HERE}/audit-policy.yaml",
                    f"--audit-log-path={d}/audit.log",
                    "--audit-log-maxsize=512",
                    "--audit-log-maxbackup=1",
                ]
            )
            waits.append(("kube-apiserver", started, lambda: self.api("/readyz") is not None))
        if "postgres" in names:
            waits.append(("postgres", self.start_postgres(port["postgres"]), lambda: self.psql("postgres", "select 1", check=False) == "1"))
        if POOLER in names:
            started = self.start_pooler(port[POOLER], port["postgres"])
            waits.append((POOLER, started, lambda: self.psql("postgres", "select 1", check=False, through=POOLER) == "1"))
        if "kube-controller-manager" in names:
            waits.append(("kube-controller-manager", None, None))
        for name, started, ready in waits:
            with step(f"{name} on port {port[name]}") as more:
                if name == "kube-controller-manager":
                    started = self.start_controller_manager(programs, port)
                    # It has worked once the account is there; without it pods are refused.
                    account = "/api/v1/namespaces/default/serviceaccounts/default"
                    ready = lambda: tls_ok(port[name], "/healthz") and self.api(account) is not None
                part[name].wait_ready(ready)
                if name == "postgres" and self.psql("postgres", "select 1 from pg_database where datname = 'jobrequest'") != "1":
                    self.psql("postgres", "create role jobrequest login createdb createrole")
                    self.psql("postgres", "create database jobrequest owner jobrequest")
                more.append("started" if started else "running already")
        self.write_env(names)

    def start_controller_manager(self, programs, port):
        k = f"{self.directory}/controller-manager.kubeconfig"
        return self.parts["kube-controller-manager"].ensure(
            [
                programs / "kube-controller-manager",
                f"--master=https://127.0.0.1:{port['kube-apiserver']}",
                f"--kubeconfig={k}",
                f"--authentication-kubeconfig={k}",
                f"--authorization-kubeconfig={k}",
                "--bind-address=127.0.0.1",
                f"--secure-port={port['kube-controller-manager']}",
                "--leader-elect=false",
                "--kube-api-qps=200",  # the defaults make it take five seconds to start
                "--kube-api-burst=400",
                "--use-service-account-credentials=true",
                f"--service-account-private-key-file={self.pki}/sa.key",
                f"--root-ca-file={self.pki}/ca.crt",
            ]
        )

    def down(self, names, with_signal=None, quiet=False):
        for name in [POOLER, *reversed(ALL)]:
            if name in names:
                with contextlib.nullcontext([]) if quiet else step(name) as more:
                    more.append("stopped" if self.parts[name].stop(with_signal) else "didn't run")

    def clean(self, quiet=False):
        self.down([*ALL, POOLER], quiet=quiet)
        if self.data.is_symlink():
            shutil.rmtree(self.data.resolve(), ignore_errors=True)
        shutil.rmtree(self.directory, ignore_errors=True)

    # --- Kubernetes

    def make_pki(self):
        """The cluster's own authority, and its certificates and keys: once, as they are in etcd's tokens and in kubeconfigs."""
        if (self.pki / "sa.pub").exists():
            return
        if not shutil.which("openssl"):
            lib.apt_install("openssl")
        shutil.rmtree(self.pki, ignore_errors=True)
        self.pki.mkdir(mode=0o700)

        def openssl(*words):
            done = subprocess.run(["openssl", *words], cwd=self.pki, capture_output=True, text=True)
            if done.returncode:
                raise Failed(f"openssl {words[0]}: {done.stderr.strip()}")

        def key(name):
            openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")

        key("ca")
        openssl(
            *"req -x509 -new -key ca.key -days 3650 -subj /CN=local -out ca.crt -addext basicConstraints=critical,CA:TRUE".split(),
            *"-addext keyUsage=critical,keyCertSign,digitalSignature".split(),
        )
        for name, subject, usage in (
            ("apiserver", "/CN=kube-apiserver", "serverAuth\nsubjectAltName=DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"),
            ("admin", "/O=system:masters/CN=admin", "clientAuth"),
            ("controller-manager", "/CN=system:kube-controller-manager", "clientAuth"),
        ):
            key(name)
            (self.pki / "ext").write_text(f"keyUsage=critical,digitalSignature\nextendedKeyUsage={usage}\n")
            openssl("req", "-new", "-key", f"{name}.key", "-subj", subject, "-out", f"{name}.csr")
            openssl(*f"x509 -req -in {name}.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 3650 -out {name}.crt -extfile ext".split())
        key("sa")
        openssl("ec", "-in", "sa.key", "-pubout", "-out", "sa.pub")

    def write_kubeconfig(self, user, port):
        def data(name):
            return base64.b64encode((self.pki / name).read_bytes()).decode()

        path = self.kubeconfig if user == "admin" else self.directory / f"{user}.kubeconfig"
        write_kubeconfig(
            path,
            {"server": f"https://127.0.0.1:{port}", "certificate-authority-data": data("ca.crt")},
            {"client-certificate-data": data(f"{user}.crt"), "client-key-data": data(f"{user}.key")},
        )

    def api(self, path):
        """GET as the administrator; None unless it answers 200."""
        context = ssl.create_default_context(cafile=self.pki / "ca.crt")
        context.load_cert_chain(self.pki / "admin.crt", self.pki / "admin.key")
        return get(http.client.HTTPSConnection("127.0.0.1", self.ports.ports["kube-apiserver"], timeout=5, context=context), path)

    # --- Postgres

    def start_postgres(self, port):
        part = self.parts["postgres"]
        user = "postgres" if os.geteuid() == 0 else None
        data = self.find_data(user)
        programs = self.postgres_programs(data)
        prefix = as_user(user) if user else []
        if not data.exists():
            # In two steps, so that an interrupted initdb isn't taken for a database.
            new = data.with_name(data.name + ".new")
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(mode=0o700)
            if user:
                shutil.chown(new, user, user)
            command = [programs / "initdb", "-D", new, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C.UTF-8"]
            done = subprocess.run([*prefix, *map(str, command)], cwd="/", capture_output=True, text=True)
            if done.returncode:
                raise Failed(f"initdb: {done.stderr.strip()}")
            new.rename(data)
        if not part.pid():
            self.remove_stale_lock(data)
        return part.ensure(
            [
                programs / "postgres",
                "-D",
                data,
                f"--port={port}",
                "--listen_addresses=127.0.0.1",
                "--unix_socket_directories=",
                "--max_connections=300",
                f"--jobrequest.directory={self.directory}",  # a setting of nobody's: it marks the process as this directory's
            ],
            prefix=prefix,
        )

    def find_data(self, user):
        """Where the data is: here, or, where Postgres' user can't get to (as below /root), in its home and linked from here."""
        if self.data.exists() or not user:
            return self.data.resolve()  # through the link, as the processes show it
        try:
            home = pathlib.Path(pwd.getpwnam(user).pw_dir)
        except KeyError:
            self.install_postgres()
            home = pathlib.Path(pwd.getpwnam(user).pw_dir)
        if subprocess.run([*as_user(user), "test", "-x", str(self.directory)], cwd="/").returncode == 0:
            return self.data
        away = home / f"jobrequest-{hashlib.sha256(bytes(self.directory)).hexdigest()[:12]}"
        shutil.rmtree(away, ignore_errors=True)  # of a directory that was removed by hand
        self.data.unlink(missing_ok=True)
        self.data.symlink_to(away)
        return away

    def postgres_programs(self, data):
        """The newest installed version's programs, or those of the version that made the data."""
        made_by = (data / "PG_VERSION").read_text().strip() if data.exists() else None

        def find():
            found = [p.parent for p in pathlib.Path("/usr/lib/postgresql").glob("*/bin/initdb")]
            return sorted((p for p in found if not made_by or p.parent.name == made_by), key=lambda p: int(p.parent.name))

        if not find() and not made_by:
            self.install_postgres()
        if not find():
            raise Failed(f"Postgres {made_by or ''} isn't installed; apt-get install postgresql-{made_by}, or make clean to drop its data")
        return find()[-1]

    def install_postgres(self):
        # The package would otherwise make and start a cluster of its own.
        if os.geteuid() == 0:
            conf = pathlib.Path("/etc/postgresql-common/createcluster.d/jobrequest.conf")
            conf.parent.mkdir(parents=True, exist_ok=True)
            conf.write_text("create_main_cluster = false\n")
        lib.apt_install("postgresql")

    def remove_stale_lock(self, data):
        """After a kill -9 or a reboot, postmaster.pid may name a process that has nothing to do with this database."""

        def users():
            return [pid for pid in lib.all_pids() if cwd(pid) == str(data)]

        if not lib.wait_until(lambda: not users(), 3):
            for pid in users():  # what a killed postmaster left and didn't notice yet
                os.kill(pid, signal.SIGKILL)
            lib.wait_until(lambda: not users(), 5)
        (data / "postmaster.pid").unlink(missing_ok=True)

    # --- PgBouncer

    def start_pooler(self, port, postgres):
        """In transaction mode, with as few servers as make clients share them. It knows of every database by itself."""
        program = self.find_pooler() or (lib.apt_install(POOLER), self.find_pooler())[1]
        if not program:
            raise Failed("pgbouncer is installed, and not found in PATH or /usr/sbin")
        # Without ignore_startup_parameters, as it is when installed.
        settings = self.directory / f"{POOLER}.ini"
        users = settings.with_suffix(".users")
        users.write_text('"jobrequest" ""\n"postgres" ""\n')
        settings.write_text(
            f"[databases]\n* = host=127.0.0.1 port={postgres}\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            f"auth_type = trust\nauth_file = {users}\npool_mode = transaction\ndefault_pool_size = 4\n"
            f"max_client_conn = 1000\nserver_idle_timeout = 10\nlog_connections = 0\nlog_disconnections = 0\n"
        )
        # It refuses to be root; having read its settings it becomes somebody else.
        user = ["-u", "postgres"] if os.geteuid() == 0 else []
        return self.parts[POOLER].ensure([program, *user, settings])

    def find_pooler(self):
        return shutil.which(POOLER) or shutil.which(POOLER, path="/usr/sbin")

    def psql(self, database, query, check=True, through="postgres"):
        command = ["psql", "-h", "127.0.0.1", "-p", str(self.ports.ports[through]), "-U", "postgres", "-d", database, "-XtAc", query]
        done = subprocess.run(command, capture_output=True, text=True)
        if check and done.returncode:
            raise Failed(f"psql: {done.stderr.strip()}", self.parts["postgres"].log)
        return done.stdout.strip()

    # ---

    def exports(self):
        """What a shell needs to work with these stores."""
        env = {"JOBREQUEST_CLUSTER_DIR": str(self.directory)}
        known = Ports(self.directory).ports
        if "kube-apiserver" in known:
            env["KUBECONFIG"] = str(self.kubeconfig)
        if "postgres" in known:
            env["DATABASE_URL"] = self.database_url
        if POOLER in known:
            env["JOBREQUEST_TEST_POOLER_URL"] = self.pooler_url
        return env

    def write_env(self, names):
        write_env(self.directory / "env", self.exports(), [lib.cluster_bin(), lib.helm_directory()] if set(names) & set(KUBE) else [])


def write_kubeconfig(path, cluster, user, namespace="default"):
    """JSON is YAML too."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "local", "cluster": cluster}],
        "users": [{"name": "local", "user": user}],
        "contexts": [{"name": "local", "context": {"cluster": "local", "user": "local", "namespace": namespace}}],
        "current-context": "local",
    }
    write_private(path, json.dumps(config, indent=1) + "\n")


def write_env(path, variables, directories):
    lines = [f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()]
    if directories:
        lines.append(f"export PATH={':'.join(shlex.quote(str(d)) for d in directories)}:$PATH\n")
    write_private(path, "".join(lines))


def write_private(path, text):
    new = path.with_name(path.name + ".new")
    new.unlink(missing_ok=True)
    with open(os.open(new, os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        file.write(text)
    new.rename(path)


def as_user(user):
    """Becomes the user in the same process, so that the pid stays."""
    return ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", "--"]


def cwd(pid):
    try:
        return os.readlink(f"/proc/{pid}/cwd")
    except OSError:
        return None


def get(connection, path):
    """The answer's body; None unless its status is 200."""
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.read() if answer.status == 200 else None
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def http_ok(port, path):
    return get(http.client.HTTPConnection("127.0.0.1", port, timeout=5), path) is not None


def tls_ok(port, path):
    context = ssl._create_unverified_context()  # it signs its certificate itself, anew at each start
    return get(http.client.HTTPSConnection("127.0.0.1", port, timeout=5, context=context), path) is not None
