//! docs/kinds.md lists the reasons that the code has, no more and no less.

use std::collections::BTreeSet;
use std::path::Path;

const DOCS: &str = include_str!("../../docs/kinds.md");
const SRC: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/src");

/// Reasons that a file's code can give: string literals of several words run together, and the two of one word.
fn reasons_of(file: &Path) -> BTreeSet<String> {
    let text = std::fs::read_to_string(file).unwrap();
    let code: Vec<_> = text.lines().take_while(|line| *line != "mod tests {").collect();
    let code = code.iter().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
    let is_reason = |word: &&str| {
        let humps = word.bytes().filter(u8::is_ascii_uppercase).count();
        word.bytes().all(|byte| byte.is_ascii_alphabetic())
            && word.starts_with(|c: char| c.is_ascii_uppercase())
            && (2..word.len() / 2).contains(&humps)
            || ["Cancelled", "Timeout"].contains(word)
    };
    code.split('"').skip(1).step_by(2).filter(is_reason).map(str::to_owned).collect()
}

/// Those of a module: `NAME.rs`, without its tests, and all below `NAME/`.
fn reasons_in(module: &str) -> BTreeSet<String> {
    let (file, directory) = (Path::new(SRC).join(format!("{module}.rs")), Path::new(SRC).join(module));
    let mut found = if file.is_file() { reasons_of(&file) } else { BTreeSet::new() };
    for entry in std::fs::read_dir(directory).into_iter().flatten() {
        let path = entry.unwrap().path();
        if path.is_file() && !path.ends_with("tests.rs") {
            found.extend(reasons_of(&path));
        }
    }
    found
}

/// What the tables of a section list.
fn listed(section: &str) -> BTreeSet<String> {
    let (_, rest) = DOCS.split_once(&format!("\n## {section}\n")).expect(section);
    let text = rest.split("\n## ").next().unwrap();
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once("` |"));
    rows.map(|(name, _)| name.to_owned()).filter(|name| name.starts_with(|c: char| c.is_ascii_uppercase())).collect()
}

#[test]
fn every_reason_is_documented_where_its_kind_is_and_no_other_is() {
    let union = |sets: &[BTreeSet<String>]| sets.iter().flatten().cloned().collect::<BTreeSet<_>>();
    let general = listed("All kinds");
    let own = |modules: &[&str]| {
        let found = union(&modules.iter().map(|module| reasons_in(module)).collect::<Vec<_>>());
        found.difference(&general).cloned().collect::<BTreeSet<_>>()
    };
    let egress = own(&["kinds/egress"]);
    assert!(egress.contains("AddressNotAllowed"), "{egress:?}");
    assert_eq!(listed("webhook_delivery"), union(&[egress.clone(), own(&["kinds/webhook"])]));
    assert_eq!(listed("send_email"), own(&["kinds/email"]));
    assert_eq!(listed("resize_image"), own(&["kinds/image"]));
    assert_eq!(listed("summarize_text"), own(&["kinds/summary"]));
    // `kinds/mod.rs` and `kinds/cpu.rs` are everybody's; a worker's own words are sentences that begin with the reason.
    let worker = std::fs::read_to_string(format!("{SRC}/worker/execute.rs")).unwrap();
    let shared = union(&[
        reasons_of(&Path::new(SRC).join("kinds/mod.rs")),
        reasons_in("kinds/payload"),
        reasons_in("kinds/cpu"),
    ]);
    for reason in &general {
        assert!(
            shared.contains(reason) || worker.contains(&format!("\"{reason}: ")),
            "{reason} is nowhere in the code"
        );
    }
    assert_eq!(shared.difference(&general).next(), None);
}
