//! Where mail goes out: the operator's SMTP server, in lettre's URL form.

use std::net::IpAddr;

use lettre::message::Mailbox;
use lettre::transport::smtp::authentication::Credentials;
use lettre::transport::smtp::extension::ClientId;
use url::{Host, Url};

use super::address;
use crate::kinds::SettingsError;

/// The SMTP server and the sender of all mail.
#[derive(Debug, Clone)]
pub struct SmtpSettings {
    pub(super) host: String,
    pub(super) port: u16,
    pub(super) tls: Tls,
    pub(super) credentials: Option<Credentials>,
    pub(super) hello_name: ClientId,
    pub(super) from: Mailbox,
}

/// How the connection is encrypted. There is no "if possible": what an attacker can strip protects nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tls {
    Plain,
    /// STARTTLS before anything else is said.
    Upgraded,
    /// From the first byte.
    Implicit,
}

impl SmtpSettings {
    /// `url` is `smtps://user:password@host:port`, `smtp://host?tls=required` (STARTTLS) or `smtp://host`, user and
    /// password percent-encoded, the path if any the name for EHLO. Without TLS only a loopback host is taken, unless
    /// `allow_plaintext`. `from` is one address, with a display name if wanted.
    ///
    /// # Errors
    /// A sentence that says which of the two is wrong and why, without the password.
    pub fn parse(url: &str, from: &str, allow_plaintext: bool) -> Result<Self, SettingsError> {
        let url = Url::parse(url).map_err(|_| wrong("is not a URL such as smtps://user:password@host:465"))?;
        let host = match url.host() {
            Some(Host::Ipv6(v6)) => v6.to_string(),
            Some(host) => host.to_string(),
            None => return Err(wrong("names no host")),
        };
        if url.query_pairs().any(|(key, _)| key != "tls") {
            // Not which: a password with a question mark in it reads as one.
            return Err(wrong("has an unknown parameter; only `tls` is known"));
        }
        let wanted = url.query_pairs().find(|(key, _)| key == "tls").map(|(_, value)| value.into_owned());
        let (tls, default_port) = match (url.scheme(), wanted.as_deref()) {
            ("smtps", _) => (Tls::Implicit, 465),
            ("smtp", Some("required")) => (Tls::Upgraded, 587),
            ("smtp", None) => (Tls::Plain, 25),
            ("smtp", Some("opportunistic")) => {
                return Err(wrong("asks for opportunistic TLS, which an attacker can strip; use tls=required"));
            }
            ("smtp", Some(_)) => return Err(wrong("has an unknown value of `tls`; use tls=required")),
            _ => return Err(wrong("must begin with smtp:// or smtps://")),
        };
        if tls == Tls::Plain && !allow_plaintext && !is_loopback(&host) {
            return Err(wrong(
                "would send mail unencrypted; use smtps:// or ?tls=required, or set JOBREQUEST_SMTP_ALLOW_PLAINTEXT=true",
            ));
        }
        let credentials = credentials(&url)?;
        let hello_name = match url.path().trim_matches('/') {
            "" => ClientId::default(),
            name => ClientId::Domain(name.to_owned()),
        };
        let mut senders = address::parse_list(from)
            .map_err(|problem| SettingsError::new(format!("the sender of mail {problem}")))?
            .into_iter();
        let (Some(from), None) = (senders.next(), senders.next()) else {
            return Err(SettingsError::new("the sender of mail must be one address"));
        };
        let port = url.port().unwrap_or(default_port);
        Ok(Self { host, port, tls, credentials, hello_name, from })
    }
}

fn wrong(problem: impl std::fmt::Display) -> SettingsError {
    SettingsError::new(format!("the SMTP URL {problem}"))
}

fn is_loopback(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

fn credentials(url: &Url) -> Result<Option<Credentials>, SettingsError> {
    let decoded = |text: &str| {
        percent_encoding::percent_decode_str(text)
            .decode_utf8()
            .map(|text| text.into_owned())
            .map_err(|_| wrong("has a user or password that is not UTF-8"))
    };
    match (url.username(), url.password()) {
        ("", None) => Ok(None),
        (user, Some(password)) if !user.is_empty() => Ok(Some(Credentials::new(decoded(user)?, decoded(password)?))),
        _ => Err(wrong("must have both a user and a password, or neither")),
    }
}
