//! kubectl as a person runs it, against the API server at `$KUBECONFIG`.

use std::io::Write;
use std::process::{Command, Stdio};

use uuid::Uuid;

/// What kubectl printed: `Ok` on stdout, or `Err` on stderr when its exit code is not zero.
pub fn kubectl(args: &[&str], stdin: &str) -> Result<String, String> {
    assert!(std::env::var_os("KUBECONFIG").is_some(), "KUBECONFIG isn't set: run make test");
    let mut child = Command::new("kubectl")
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("kubectl can't be started ({error}): run make test"));
    child.stdin.take().expect("piped").write_all(stdin.as_bytes()).expect("kubectl reads its input to the end");
    let output = child.wait_with_output().expect("kubectl ends");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("kubectl writes UTF-8");
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

/// A namespace of this test alone, deleted at its end even if it panics.
pub struct Namespace(String);

impl Namespace {
    pub fn new() -> Self {
        let name = format!("test-{}", Uuid::new_v4().simple());
        kubectl(&["create", "namespace", &name], "").unwrap();
        Self(name)
    }

    pub fn name(&self) -> &str {
        &self.0
    }

    /// kubectl in this namespace; a failure ends the test.
    pub fn kubectl(&self, args: &[&str], stdin: &str) -> String {
        self.try_kubectl(args, stdin).unwrap_or_else(|error| panic!("kubectl {}: {error}", args.join(" ")))
    }

    pub fn try_kubectl(&self, args: &[&str], stdin: &str) -> Result<String, String> {
        kubectl(&[&["--namespace", &self.0], args].concat(), stdin)
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        drop(kubectl(&["delete", "namespace", &self.0, "--wait=false"], ""));
    }
}

/// A JobRequest of this name, its spec in YAML's flow style.
pub fn job_request(name: &str, spec: &str) -> String {
    format!(
        "apiVersion: jobrequest.dev/v1alpha1\nkind: JobRequest\nmetadata: {{name: {name}}}\nspec: {}\n",
        spec.replace('\n', " ")
    )
}
