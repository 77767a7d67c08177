//! Which environment variables are settings, and which only look like one.

use std::ffi::OsString;

const PREFIX: &str = "JOBREQUEST_";

/// Ours, but not the program's: the scripts under tests/cluster set them, and all that begin with TESTS.
const OTHERS: [&str; 2] = ["JOBREQUEST_CACHE", "JOBREQUEST_CLUSTER_DIR"];
const TESTS: &str = "JOBREQUEST_TEST_";

/// The variables of a command and all below it. Every subcommand knows those of the others: programs that start from
/// one environment use different parts of it.
pub(super) fn known_to(command: &clap::Command) -> Vec<String> {
    let own = command.get_arguments().filter_map(|arg| Some(arg.get_env()?.to_str()?.to_owned()));
    own.chain(command.get_subcommands().flat_map(known_to)).collect()
}

/// The variable of a flag such as `--kinds`.
pub(super) fn variable_of(command: &clap::Command, flag: &str) -> Option<String> {
    let name = flag.strip_prefix("--")?;
    let own = command.get_arguments().find(|arg| arg.get_long() == Some(name));
    match own.and_then(|arg| arg.get_env()) {
        Some(variable) => Some(variable.to_string_lossy().into_owned()),
        None => command.get_subcommands().find_map(|sub| variable_of(sub, flag)),
    }
}

/// # Errors
/// The first variable that looks like a setting and is none, in one line.
pub(super) fn check(variables: &[OsString], known: &[String]) -> Result<(), String> {
    let mut unknown: Vec<&str> = variables
        .iter()
        .filter_map(|name| name.to_str())
        .filter(|name| name.starts_with(PREFIX) && !OTHERS.contains(name))
        .filter(|name| !name.starts_with(TESTS) && !is_of_a_service(name))
        .filter(|name| !known.iter().any(|known| known == name))
        .collect();
    unknown.sort_unstable();
    let Some(name) = unknown.first() else { return Ok(()) };
    let name = crate::text::cut(name, 128);
    Err(match nearest(name, known) {
        Some(nearest) => format!("{name} is not a setting: did you mean {nearest}?"),
        None => format!("{name} is not a setting: see jobrequest worker --help and jobrequest controller --help"),
    })
}

/// Kubernetes gives each Pod variables for each Service of its namespace; of one called `jobrequest` or
/// `jobrequest-metrics` these begin as ours do: JOBREQUEST_SERVICE_HOST, JOBREQUEST_METRICS_PORT_8080_TCP_ADDR.
fn is_of_a_service(name: &str) -> bool {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let after_port = |rest: &str| match rest.strip_prefix('_').and_then(|rest| rest.split_once('_')) {
        Some((port, protocol)) => digits(port) && ["TCP", "UDP", "SCTP"].iter().any(|p| protocol.starts_with(p)),
        None => rest.is_empty(),
    };
    name.ends_with("_SERVICE_HOST")
        || name.contains("_SERVICE_PORT")
        || name.match_indices("_PORT").any(|(at, port)| after_port(&name[at + port.len()..]))
}

/// The name of which this one is a part or the other way round, or the most similar one, if it is similar.
fn nearest<'k>(name: &str, known: &'k [String]) -> Option<&'k str> {
    let part = known.iter().find(|known| known.starts_with(name) || name.starts_with(known.as_str()));
    if let Some(part) = part {
        return Some(part);
    }
    let by_distance = known.iter().map(|known| (distance(name, known), known.as_str()));
    by_distance.min().filter(|(distance, _)| *distance <= 5).map(|(_, known)| known)
}

/// Levenshtein's: how many letters must change, come or go.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let changed = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(name: &str) -> Result<(), String> {
        check(&[name.into()], &["JOBREQUEST_KINDS".to_owned(), "JOBREQUEST_HTTP_ADDR".to_owned()])
    }

    #[test]
    fn a_misspelt_setting_is_named_with_the_right_one() {
        assert_eq!(
            line("JOBREQUEST_KIND"),
            Err("JOBREQUEST_KIND is not a setting: did you mean JOBREQUEST_KINDS?".into())
        );
        assert!(line("JOBREQUEST_SOMETHING_ELSE").is_err_and(|line| line.contains("--help")));
        assert_eq!(line("JOBREQUEST_KINDS"), Ok(()));
    }

    #[test]
    fn the_variables_of_a_service_with_our_name_are_not_settings() {
        for name in [
            "JOBREQUEST_SERVICE_HOST",
            "JOBREQUEST_SERVICE_PORT_HTTP",
            "JOBREQUEST_PORT",
            "JOBREQUEST_METRICS_PORT_8080_TCP",
            "JOBREQUEST_METRICS_PORT_8080_TCP_ADDR",
        ] {
            assert_eq!(line(name), Ok(()), "{name}");
        }
        assert!(line("JOBREQUEST_PORTS").is_err());
        assert!(line("JOBREQUEST_PORT_RANGE").is_err());
    }

    #[test]
    fn a_distance_counts_changes() {
        assert_eq!([distance("a", "a"), distance("", "ab"), distance("kitten", "sitting")], [0, 2, 3]);
    }
}
