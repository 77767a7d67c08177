//! Who may know whom, as ARCHITECTURE.md draws it: read from the sources' own words.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

const SRC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");
const LINES_MAX: usize = 400;

/// A room, the rooms that it may know, the crates and calls that it must not use.
type Border<'a> = (&'a str, &'a [&'a str], &'a [&'a str]);

const BORDERS: &[Border] = &[
    (
        "main",
        &["admin", "api", "check", "cli", "controller", "kinds", "queue", "telemetry", "worker"],
        &["sqlx::query", "kube::"],
    ),
    ("cli", &["check", "controller", "job", "kinds", "queue", "text", "worker"], &["kube::", "k8s_openapi::"]),
    (
        "controller",
        &["admin", "api", "job", "kinds", "queue", "text"],
        &["sqlx::query", "lettre::", "reqwest::", "env::"],
    ),
    ("worker", &["admin", "job", "kinds", "queue", "text"], &["kube::", "k8s_openapi::", "sqlx::query", "env::"]),
    ("kinds", &["job", "text"], &["sqlx::", "kube::", "k8s_openapi::", "env::"]),
    ("queue", &["job", "text"], &["kube::", "k8s_openapi::", "env::"]),
    ("job", &["text"], &["sqlx::", "kube::", "k8s_openapi::", "tokio::", "rand::", "::now(", "env::"]),
    ("api", &["text"], &["sqlx::", "tokio::", "env::"]),
    ("check", &["api", "text"], &["sqlx::", "env::"]),
    ("admin", &["job", "queue", "text"], &["kube::", "sqlx::query", "env::"]),
    ("telemetry", &["cli", "text"], &["env::"]),
    ("text", &[], &["env::"]),
    ("lib", &[], &[]),
];

/// Where rooms meet that meet nowhere else: the one knows the other in these files only.
const DOORS: &[(&str, &str, &[&str])] = &[
    ("controller", "kinds", &["controller/validate.rs"]),
    ("controller", "job", &["controller/reconcile.rs", "controller/spec.rs", "controller/status.rs"]),
    ("cli", "controller", &["cli/settings.rs"]),
    ("cli", "worker", &["cli/settings.rs"]),
];

struct Source {
    /// Below src, such as `queue/claim.rs`.
    path: String,
    /// Without comments.
    text: String,
    /// Lines before the tests.
    lines: usize,
}

impl Source {
    fn room(&self) -> &str {
        self.path.split('/').next().unwrap().trim_end_matches(".rs")
    }

    fn is_test(&self) -> bool {
        self.path.ends_with("tests.rs")
    }

    /// How many `super::` lead from this file to the crate's root.
    fn depth(&self) -> usize {
        let names = self.path.trim_end_matches(".rs").split('/').filter(|name| !["mod", "lib", "main"].contains(name));
        names.count()
    }

    /// The rooms that it names.
    fn known(&self) -> BTreeSet<String> {
        let to_root = "super::".repeat(self.depth());
        let mut roots = vec!["crate::", "jobrequest::"];
        if self.depth() > 0 && !self.is_test() {
            roots.push(&to_root);
        }
        let mut known = BTreeSet::new();
        for root in roots {
            for (at, _) in self.text.match_indices(root) {
                let before = self.text[..at].chars().next_back().unwrap_or(' ');
                let rest = &self.text[at + root.len()..];
                if before.is_alphanumeric() || before == '_' || before == ':' || rest.starts_with("super::") {
                    continue;
                }
                known.extend(first_names(rest));
            }
        }
        known.remove(self.room());
        known.retain(|name| BORDERS.iter().any(|(room, ..)| room == name));
        known
    }
}

/// `a::b` names `a`; `{a::{b, c}, d}` names `a` and `d`.
fn first_names(path: &str) -> Vec<String> {
    let name = |text: &str| text.trim().chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect::<String>();
    let Some(group) = path.strip_prefix('{') else { return vec![name(path)] };
    let mut depth = 0;
    let mut names = vec![String::new()];
    for c in group.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                names.push(String::new());
                continue;
            }
            _ => {}
        }
        names.last_mut().unwrap().push(c);
    }
    names.iter().map(|text| name(text)).collect()
}

fn sources() -> Vec<Source> {
    fn walk(directory: &Path, into: &mut Vec<PathBuf>) {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, into);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                into.push(path);
            }
        }
    }
    let mut paths = Vec::new();
    walk(Path::new(SRC), &mut paths);
    let read = |path: PathBuf| {
        let whole = std::fs::read_to_string(&path).unwrap();
        let lines = whole.lines().take_while(|line| *line != "#[cfg(test)]").count();
        // Doc examples are for readers of the docs; no string of ours holds two slashes and a room's path.
        let code = whole.lines().map(|line| line.split("//").next().unwrap());
        let path = path.strip_prefix(SRC).unwrap().to_str().unwrap().to_owned();
        Source { path, text: code.collect::<Vec<_>>().join("\n"), lines }
    };
    paths.into_iter().map(read).collect()
}

#[test]
fn no_room_knows_more_rooms_than_the_map_allows() {
    let borders: BTreeMap<_, _> = BORDERS.iter().map(|(room, allowed, _)| (*room, *allowed)).collect();
    for source in sources() {
        let path = &source.path;
        let allowed = borders.get(source.room()).unwrap_or_else(|| panic!("src/{path} is in no room of the map"));
        for known in source.known() {
            assert!(allowed.contains(&known.as_str()), "src/{path} must not know crate::{known}: see ARCHITECTURE.md");
            for (room, other, doors) in DOORS {
                let is_door = source.is_test() || doors.contains(&path.as_str());
                let is_meant = (source.room(), known.as_str()) == (*room, *other);
                assert!(!is_meant || is_door, "src/{path} knows crate::{other}; only {doors:?} may");
            }
        }
    }
}

#[test]
fn no_room_uses_what_belongs_to_another() {
    for source in sources() {
        let (_, _, forbidden) = BORDERS.iter().find(|(room, ..)| *room == source.room()).unwrap();
        for word in *forbidden {
            let uses = source.text.match_indices(word).any(|(at, _)| {
                let before = source.text[..at].chars().next_back().unwrap_or(' ');
                !(before.is_alphanumeric() || before == '_')
            });
            assert!(!uses || source.is_test(), "src/{} uses {word}", source.path);
        }
    }
}

#[test]
fn only_the_queue_writes_its_tables() {
    for source in sources().iter().filter(|source| source.room() != "queue" && !source.is_test()) {
        for statement in ["INSERT INTO job", "UPDATE job", "DELETE FROM job"] {
            assert!(!source.text.contains(statement), "src/{} writes the queue's tables: {statement}", source.path);
        }
    }
}

#[test]
fn no_file_is_longer_than_a_person_reads_at_once() {
    for source in sources().iter().filter(|source| !source.is_test()) {
        assert!(source.lines <= LINES_MAX, "src/{} has {} lines without its tests", source.path, source.lines);
    }
}

#[test]
fn the_test_of_the_map_sees_what_it_looks_for() {
    let known = |path: &str, text: &str| {
        let source = Source { path: path.to_owned(), text: text.to_owned(), lines: 1 };
        source.known().into_iter().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(known("kinds/email.rs", "use crate::queue::Queue;"), "queue");
    assert_eq!(known("kinds/email.rs", "use crate::{job::{Job, State}, text::cut, kinds};"), "job text");
    assert_eq!(known("kinds/mod.rs", "use super::queue::Queue; fn f() { super::worker::x() }"), "queue worker");
    assert_eq!(known("kinds/email.rs", "use super::super::queue; use super::worker;"), "queue");
    assert_eq!(known("main.rs", "use jobrequest::{api, worker::Worker};"), "api worker");
    assert_eq!(known("api.rs", "use my_crate::queue;"), "");
}
