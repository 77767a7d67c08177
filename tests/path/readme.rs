//! README.md's transcripts, run again: what it shows is what comes out.

use std::process::Command;

use super::kinds::{example, png};
use super::site::{Site, run};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

/// Commands and what they print, from the blocks marked `console`: a line after `$ ` and those up to the next one.
fn transcript() -> Vec<(String, String)> {
    let readme = std::fs::read_to_string(format!("{ROOT}/README.md")).unwrap();
    let blocks = readme.split("```console\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    let steps = blocks.flat_map(|block| block.split("$ ").filter(|step| !step.is_empty()));
    steps.map(|step| step.split_once('\n').unwrap()).map(|(run, out)| (run.to_owned(), out.to_owned())).collect()
}

/// Times, ids, ages and names of machines differ from run to run, and so does the width of their columns.
fn without_what_varies(text: &str, namespace: &str) -> String {
    let text = text.replace(namespace, "default");
    let word = |word: &str| {
        let is = |test: fn(char) -> bool| word.chars().all(test);
        if word.len() == 36 && word.matches('-').count() == 4 {
            "ID".to_owned()
        } else if word.len() == 20 && word.ends_with('Z') && word.contains('T') {
            "TIME".to_owned()
        } else if word.len() < 6 && word.ends_with('s') && is(|c| c.is_ascii_digit() || "ms".contains(c)) {
            "AGE".to_owned()
        } else {
            word.to_owned()
        }
    };
    let line = |line: &str| {
        let mut words: Vec<_> = line.split_whitespace().map(word).collect();
        // The wide table names the worker after the id.
        if let Some(id) = words.iter().position(|word| word == "ID")
            && let Some(worker) = words.get_mut(id + 1)
        {
            *worker = "WORKER".to_owned();
        }
        words.join(" ")
    };
    text.trim_end().lines().map(line).collect::<Vec<_>>().join("\n")
}

#[tokio::test]
async fn the_readmes_transcripts_come_out_as_written() {
    let site = Site::serving(png(1200, 800)).await;
    let (_controller, _worker) = (site.controller().start().await, site.worker().start().await);
    let directory = site.directory.path();
    std::fs::create_dir(directory.join("examples")).unwrap();
    for kind in ["send-email", "resize-image", "summarize-text", "webhook-delivery"] {
        std::fs::write(directory.join(format!("examples/{kind}.yaml")), example(&site, kind)).unwrap();
    }
    let home = format!("{}/kubeconfig", directory.display());
    let view =
        Command::new("kubectl").env("KUBECONFIG", &site.stores.kubeconfig).args(["config", "view", "--raw"]).output();
    std::fs::write(&home, view.unwrap().stdout).unwrap();
    let mut here = Command::new("kubectl");
    here.env("KUBECONFIG", &home).args(["config", "set-context", "--current", "--namespace", &site.namespace]);
    assert!(run(here, String::new()).await.status.success());

    let steps = transcript();
    assert!(steps.len() >= 8, "{steps:?}");
    for (command, expected) in steps {
        let mut shell = Command::new("bash");
        shell.args(["-c", &format!("{command} 2>&1")]).current_dir(directory).env("KUBECONFIG", &home);
        let output = run(shell, String::new()).await;
        let printed = String::from_utf8_lossy(&output.stdout);
        assert_eq!(
            without_what_varies(&printed, &site.namespace),
            without_what_varies(&expected, &site.namespace),
            "$ {command}\n{printed}"
        );
    }
}
