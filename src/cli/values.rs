//! How the text of a setting is read. A message goes after the setting's name and holds nothing of the value.

use std::net::SocketAddr;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::PgConnectOptions;
use tracing_subscriber::EnvFilter;

use crate::kinds::MemoryBudget;
use crate::kinds::egress::OriginLimit;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum LogFormat {
    Text,
    Json,
}

/// A text that is shown nowhere.
#[derive(Clone)]
pub(super) struct Secret(pub(super) String);

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// A whole number within bounds, the bounds included.
pub(super) fn whole(text: &str, from: u64, to: u64) -> Result<u64, String> {
    match text.parse() {
        Ok(number) if (from..=to).contains(&number) => Ok(number),
        _ => Err(format!("is not a whole number from {from} to {to}")),
    }
}

pub(super) fn origin_limit(text: &str) -> Result<OriginLimit, String> {
    let calls = whole(text, 1, u64::from(OriginLimit::MAX))?;
    Ok(OriginLimit::new(u16::try_from(calls).unwrap_or(OriginLimit::MAX)))
}

/// Seconds, with a fraction if wanted.
fn fraction(text: &str, from: f64, to: f64) -> Result<Duration, String> {
    match text.parse() {
        Ok(seconds) if (from..=to).contains(&seconds) => Ok(Duration::from_secs_f64(seconds)),
        _ => Err(format!("is not a number from {from} to {to}")),
    }
}

const DAY: u64 = 24 * 60 * 60;
/// What a column of whole seconds holds.
const LONG: u64 = i32::MAX as u64;

pub(super) fn slots(text: &str) -> Result<usize, String> {
    whole(text, 1, 10_000).map(|slots| usize::try_from(slots).unwrap_or(usize::MAX))
}

pub(super) fn reconciles(text: &str) -> Result<u16, String> {
    whole(text, 1, 1000).map(|reconciles| u16::try_from(reconciles).unwrap_or(u16::MAX))
}

pub(super) fn lease(text: &str) -> Result<Duration, String> {
    whole(text, 1, DAY).map(Duration::from_secs)
}

pub(super) fn timeout(text: &str) -> Result<Duration, String> {
    whole(text, 1, DAY).map(Duration::from_secs)
}

pub(super) fn poll(text: &str) -> Result<Duration, String> {
    fraction(text, 0.01, 3600.0)
}

pub(super) fn grace(text: &str) -> Result<Duration, String> {
    whole(text, 0, DAY).map(Duration::from_secs)
}

pub(super) fn back_off(text: &str) -> Result<Duration, String> {
    fraction(text, 0.001, 86_400.0)
}

pub(super) fn retention(text: &str) -> Result<Duration, String> {
    whole(text, 0, LONG).map(Duration::from_secs)
}

pub(super) fn memory_budget(text: &str) -> Result<MemoryBudget, String> {
    let mib = whole(text, u64::from(MemoryBudget::MIN_MIB), u64::from(MemoryBudget::MAX_MIB))?;
    Ok(MemoryBudget::from_mib(u32::try_from(mib).unwrap_or(MemoryBudget::MAX_MIB)))
}

/// `host:port` with a literal address; `:port` for every interface.
pub(super) fn address(text: &str) -> Result<SocketAddr, String> {
    let whole = if text.starts_with(':') { format!("0.0.0.0{text}") } else { text.to_owned() };
    whole.parse().map_err(|_| "is not an address with a port, such as 0.0.0.0:8080 or [::]:8080".to_owned())
}

/// `level` or `target=level`, separated by commas.
pub(super) fn log_filter(text: &str) -> Result<String, String> {
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
        let level = part.rsplit_once('=').map_or(part, |(_, level)| level);
        if !levels.contains(&level.to_ascii_lowercase().as_str()) {
            let level = crate::text::cut(level, 32);
            return Err(format!("`{level}` is not a level: {}, or target=level, by commas", levels.join(", ")));
        }
    }
    // What the log itself would refuse, such as a target in brackets that never close.
    match EnvFilter::try_new(text) {
        Ok(_) => Ok(text.to_owned()),
        Err(_) => Err("is no list of levels and target=level".to_owned()),
    }
}

/// Names separated by commas or blanks.
pub(super) fn names(text: &str) -> Vec<String> {
    text.split(|c: char| c == ',' || c.is_whitespace()).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// A label as in RFC 1123, which a namespace's name is.
pub(super) fn is_label(name: &str) -> bool {
    let inner = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(inner) && !name.starts_with('-') && !name.ends_with('-')
}

pub(super) fn install(text: &str) -> Result<String, String> {
    if is_label(text) {
        Ok(text.to_owned())
    } else {
        Err("is not a name: lower case letters, digits and -, at most 63".to_owned())
    }
}

/// A namespace's uid, as Kubernetes writes them.
pub(super) fn uid(text: &str) -> Result<String, String> {
    let uid: uuid::Uuid = text.parse().map_err(|_| "is not a uid: 8-4-4-4-12 hexadecimal digits".to_owned())?;
    Ok(uid.to_string())
}

/// A Postgres URL; the message holds no part of it.
pub(super) fn database(url: &str) -> Result<PgConnectOptions, String> {
    let example = "write it as postgres://user:password@host:5432/database";
    let parsed = url::Url::parse(url).map_err(|error| {
        format!("is not a URL ({error}): {example}, with special characters of the password percent-encoded")
    })?;
    if !["postgres", "postgresql"].contains(&parsed.scheme()) {
        return Err(format!("is not a URL of Postgres: {example}"));
    }
    // The client's own message may quote a parameter, and a parameter may be a password.
    url.parse().map_err(|_| "has a parameter that can't be used (is it sslmode?)".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_filter_is_made_of_levels() {
        for good in ["info", "warn,jobrequest=debug", "WARN", "sqlx::query=off, info"] {
            assert!(log_filter(good).is_ok(), "{good}");
        }
        for bad in ["loud", "info,sqlx=", "jobrequest", "info;debug", "sqlx[{=info"] {
            assert!(log_filter(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn an_address_may_leave_out_the_host() {
        assert_eq!(address(":8080").map(|addr| addr.to_string()), Ok("0.0.0.0:8080".to_owned()));
        assert!(address("[::1]:1").is_ok() && address("localhost:1").is_err() && address("0.0.0.0").is_err());
    }

    #[test]
    fn seconds_are_finite_and_within_their_bounds() {
        for bad in ["", "inf", "NaN", "-0.5", "1e9", "2s"] {
            assert!(poll(bad).is_err(), "{bad}");
        }
        assert_eq!(poll("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(retention("0"), Ok(Duration::ZERO));
        assert!(lease("1.5").is_err());
    }
}
