//! Address lists out of payloads and settings.

use lettre::Address;
use lettre::message::{Mailbox, Mailboxes};
use url::Host;

/// So that one name, quoted, and its address fit on a line of 998 octets.
const MAX_NAME_CHARS: usize = 320;

/// Reads an RFC 5322 mailbox list: `a@x.org, "B, C" <b@x.org>`. Domains come out as A-labels, so that nothing but a
/// local part can need SMTPUTF8.
///
/// # Errors
/// What is wrong, as the rest of a sentence that begins with the field: never the addresses.
pub(super) fn parse_list(text: &str) -> Result<Vec<Mailbox>, &'static str> {
    if text.chars().any(char::is_control) {
        return Err("must hold no line breaks or other control characters");
    }
    let mailboxes: Mailboxes =
        text.trim().parse().map_err(|_| "must be a list of addresses such as a@example.com, B <b@example.com>")?;
    let mailboxes: Vec<Mailbox> = mailboxes.into_iter().map(with_ascii_domain).collect::<Result<_, _>>()?;
    if mailboxes.is_empty() { Err("must hold at least one address") } else { Ok(mailboxes) }
}

fn with_ascii_domain(Mailbox { name, email, .. }: Mailbox) -> Result<Mailbox, &'static str> {
    if let Some(name) = &name {
        if name.chars().any(char::is_control) {
            return Err("must hold no control characters");
        }
        if name.chars().count() > MAX_NAME_CHARS {
            return Err("must have no display name over 320 characters");
        }
    }
    let domain = ascii_domain(email.domain()).ok_or("must have domain names after the @")?;
    let email = Address::new(email.user(), domain).map_err(|_| "must have domain names after the @")?;
    Ok(Mailbox::new(name, email))
}

/// The domain in A-labels of letters, digits and hyphens (RFC 5321, section 4.1.2; RFC 5890).
fn ascii_domain(domain: &str) -> Option<String> {
    let ascii = if domain.is_ascii() {
        domain.to_owned()
    } else {
        // the URL's host parser would decode a percent sign
        match Host::parse(domain) {
            Ok(Host::Domain(ascii)) if !domain.contains('%') => ascii,
            _ => return None,
        }
    };
    let label =
        |label: &str| (1..=63).contains(&label.len()) && label.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    (ascii.len() <= 253 && ascii.split('.').all(label)).then_some(ascii)
}
