"""The local system: the stores, what the chart installs in the cluster, the migrated database, controller and worker."""

import base64
import hashlib
import json
import os
import pathlib
import re
import secrets
import shutil
import subprocess

import lib
from lib import Failed, Part, Ports, say, step
from stores import ALL, Stores, http_ok, write_env, write_kubeconfig, write_private

DIRECTORY = lib.ROOT / ".local"
NAMESPACE = "jobrequest-system"
PROGRAMS = ["controller", "worker"]
# The chart's objects without those that need nodes: here the programs run beside the cluster.
INSTALLED = {
    "CustomResourceDefinition",
    "ServiceAccount",
    "ClusterRole",
    "ClusterRoleBinding",
    "Role",
    "RoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
}


class Program(Part):
    """`jobrequest controller` or `jobrequest worker`."""

    def is_ours(self, pid):
        # Tests run the same program with the same arguments, so the environment tells.
        line = lib.command_line(pid)
        return len(line) > 1 and line[1] == self.name and lib.environment(pid).get("LOCAL_SYSTEM") == str(self.directory)

    def same(self, pid, command, env):
        was = lib.environment(pid)
        settings = {name for name in {*was, *env} if name.startswith("JOBREQUEST_") and was.get(name) != env.get(name)}
        if settings:
            say(f"  {self.name} keeps the settings it was started with ({', '.join(sorted(settings))} differ); to apply yours: make down up")
        try:
            # Not the path: after a new build the running file is another one, though of the same name.
            same_file = os.path.samefile(f"/proc/{pid}/exe", command[0])
        except OSError:
            same_file = False
        return same_file and was.get("LOCAL_SYSTEM_PEERS") == env["LOCAL_SYSTEM_PEERS"]


class System:
    def __init__(self):
        self.directory = DIRECTORY
        self.stores = Stores(DIRECTORY)
        self.programs = {name: Program(DIRECTORY, name, None, grace=45) for name in PROGRAMS}
        self.kubeconfig, self.database_url = str(self.stores.kubeconfig), None
        self.external = self.callers_stores()

    def callers_stores(self):
        """Whether the caller's environment names a cluster and a database; what `.local/env` set there doesn't count."""
        kubeconfig, url = os.environ.get("KUBECONFIG"), os.environ.get("DATABASE_URL")
        if kubeconfig and pathlib.Path(kubeconfig).resolve() == self.stores.kubeconfig:
            return False
        if kubeconfig and url:
            self.kubeconfig, self.database_url = kubeconfig, url
            return True
        if kubeconfig or url:
            say(f"  {'KUBECONFIG' if kubeconfig else 'DATABASE_URL'} is set, but not the other one: starting stores of its own")
        return False

    # --- up and down

    def up(self):
        self.directory.mkdir(parents=True, exist_ok=True)
        self.find_tools()
        program = lib.built_program(self.directory)
        if self.external:
            say("  KUBECONFIG and DATABASE_URL are set: using those")
        else:
            self.stores.up(ALL)
            self.database_url = self.stores.database_url
        self.install_chart()
        self.write_controllers_kubeconfig()
        with step("database migrated"):
            self.logged("migrate", [program, "migrate"], env=self.environment("worker"))
        for name in PROGRAMS:
            self.start(name, program)
        self.write_env()

    def down(self):
        for name in reversed(PROGRAMS):
            with step(name) as more:
                more.append("stopped" if self.programs[name].stop() else "didn't run")
        self.stores.down(ALL)

    def start(self, name, program):
        part, env = self.programs[name], self.environment(name)
        port = env["JOBREQUEST_HTTP_ADDR"].rpartition(":")[2]
        with step(f"{name} on port {port}") as more:
            more.append("started" if part.ensure([program, name], env) else "running already")
            part.wait_ready(lambda: http_ok(int(port), "/readyz"))

    # --- settings

    def environment(self, name):
        """The caller's settings reach both programs; what a local system needs is added to them."""
        ports = Ports(self.directory)
        env = {
            "JOBREQUEST_EGRESS_ALLOW": "127.0.0.0/8",  # the demo's receivers
            "JOBREQUEST_SMTP_URL": f"smtp://127.0.0.1:{ports.get('smtp', running=True)}",
            "JOBREQUEST_SMTP_FROM": "JobRequest <jobs@example.com>",
            "JOBREQUEST_OBJECT_STORE_URL": f"file://{self.directory}/objects",
            "JOBREQUEST_WEBHOOK_SECRET": self.secret(),
            **os.environ,
            "DATABASE_URL": self.database_url,
            "JOBREQUEST_HTTP_ADDR": f"127.0.0.1:{ports.get(name, running=bool(self.programs[name].pid()))}",
            "LOCAL_SYSTEM": str(self.directory),
        }
        controllers = self.directory / "controller.kubeconfig"
        # A running program whose peers have moved is started anew.
        peers = f"{self.database_url} {ports.ports['smtp']} {controllers.read_text() if controllers.exists() else ''}"
        env["LOCAL_SYSTEM_PEERS"] = hashlib.sha256(peers.encode()).hexdigest()
        for scripts_own in ("JOBREQUEST_CACHE", "JOBREQUEST_CLUSTER_DIR", "KUBECONFIG"):
            env.pop(scripts_own, None)
        if name == "controller":
            env["KUBECONFIG"] = str(controllers)
        (self.directory / "objects").mkdir(exist_ok=True)
        return env

    def secret(self):
        file = self.directory / "webhook-secret"
        if not file.exists():
            write_private(file, base64.b64encode(secrets.token_bytes(32)).decode())
        return file.read_text()

    def write_env(self):
        ports = Ports(self.directory).ports
        variables = {
            "KUBECONFIG": self.kubeconfig,
            "DATABASE_URL": self.database_url,
            "CONTROLLER_URL": f"http://127.0.0.1:{ports['controller']}",
            "WORKER_URL": f"http://127.0.0.1:{ports['worker']}",
        }
        write_env(self.directory / "env", variables, [*self.path, self.directory / "bin"])

    # --- the cluster's part of an installation

    def find_tools(self):
        """kubectl and helm: of the local cluster, or for a cluster of the caller's the ones on PATH if there are any."""
        self.path = []
        if not (self.external and shutil.which("kubectl")):
            self.path.append(lib.cluster_bin())
        if not (self.external and shutil.which("helm")):
            self.path.append(lib.helm_bin())
        self.tools = dict(os.environ, PATH=":".join([*map(str, self.path), os.environ["PATH"]]), KUBECONFIG=self.kubeconfig)

    def run(self, *command, text=None):
        """Runs a tool against the cluster as its administrator and returns its output."""
        done = subprocess.run(list(map(str, command)), env=self.tools, input=text, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{' '.join(map(str, command[:4]))}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def logged(self, name, command, env):
        log = self.directory / f"{name}.log"
        with log.open("ab") as out:
            if subprocess.run(list(map(str, command)), env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode:
                raise Failed(f"{name} failed", log)

    def install_chart(self):
        with step("the chart's CRD, accounts and rules") as more:
            chart = lib.ROOT / "charts" / "jobrequest"
            values = chart / "ci" / "minimal-values.yaml"  # what it insists on knowing; nothing of it matters here
            chart = self.run("helm", "template", "jobrequest", chart, "--namespace", NAMESPACE, "--values", values)
            wanted = [d for d in re.split(r"^---.*$", chart, flags=re.M) if (k := re.search(r"^kind: *(\S+)", d, re.M)) and k[1] in INSTALLED]
            namespace = json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
            text = "\n---\n".join([namespace, *wanted])
            apply = ("kubectl", "apply", "--server-side", "--force-conflicts", "--field-manager=local-system", "-f", "-")
            self.run(*apply, text=text)
            self.run("kubectl", "wait", "--for=condition=Established", "crd/jobrequests.jobrequest.dev", "--timeout=30s")
            more.append(f"{len(wanted)} objects")

    def write_controllers_kubeconfig(self):
        """The controller works as its own ServiceAccount. Its token is a Secret's: that doesn't run out."""
        with step("the controller's kubeconfig"):
            name = "jobrequest-controller"
            secret = {
                "apiVersion": "v1",
                "kind": "Secret",
                "type": "kubernetes.io/service-account-token",
                "metadata": {"name": f"{name}-local", "namespace": NAMESPACE, "annotations": {"kubernetes.io/service-account.name": name}},
            }
            self.run("kubectl", "apply", "--server-side", "--field-manager=local-system", "-f", "-", text=json.dumps(secret))
            get = ("kubectl", "--namespace", NAMESPACE, "get", f"secret/{name}-local", "-o", "jsonpath={.data.token}")
            if not lib.wait_until(lambda: self.run(*get), 30, 0.2):
                raise Failed(f"no token for {name}", self.stores.parts["kube-controller-manager"].log)
            config = json.loads(self.run("kubectl", "config", "view", "--minify", "--flatten", "-o", "json"))
            token = base64.b64decode(self.run(*get)).decode()
            write_kubeconfig(self.directory / "controller.kubeconfig", config["clusters"][0]["cluster"], {"token": token}, NAMESPACE)
