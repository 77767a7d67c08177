//! The mail that a payload describes.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use lettre::message::header::{ContentType, HeaderName, HeaderValue, MessageId};
use lettre::message::{Mailbox, MultiPart, SinglePart};
use lettre::{Address, Message};
use serde::Deserialize;
use serde_json::Value;
use uuid::Uuid;

use super::address::parse_list;
use crate::kinds::Failure;
use crate::kinds::payload::{Field, PayloadError, Shape, check_fields, optional, required};

/// The least that RFC 5321, section 4.5.3.1.8, has every server take.
const MAX_RECIPIENTS: usize = 100;
/// RFC 5322, section 2.1.1: the longest line, without its CRLF, in octets.
pub(super) const MAX_LINE: usize = 998;

/// An ASCII word of a subject up to this long goes as it is.
const LONGEST_PLAIN_WORD: usize = 200;

const LIST: Shape = Shape::Text { max_chars: 32 * 1024 };
const TEXT: Shape = Shape::Text { max_chars: 1024 * 1024 };
const FIELDS: &[Field] = &[
    required("to", LIST),
    required("subject", Shape::Text { max_chars: 998 }),
    required("body", TEXT),
    optional("html", TEXT),
    optional("cc", LIST),
    optional("bcc", LIST),
    optional("reply_to", LIST),
];

#[derive(Debug)]
pub(super) struct Mail {
    to: Vec<Mailbox>,
    cc: Vec<Mailbox>,
    bcc: Vec<Mailbox>,
    reply_to: Vec<Mailbox>,
    subject: String,
    body: String,
    html: Option<String>,
}

/// One envelope recipient and where the payload names it, which is how errors speak of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Recipient {
    pub(super) address: Address,
    /// `to 1`, `bcc 3`.
    pub(super) place: String,
}

#[derive(Deserialize)]
struct Payload {
    to: String,
    subject: String,
    body: String,
    html: Option<String>,
    cc: Option<String>,
    bcc: Option<String>,
    reply_to: Option<String>,
}

impl Mail {
    /// Reads and checks a payload. What comes out can't add a header or a command of its own.
    pub(super) fn parse(payload: &Value) -> Result<Self, PayloadError> {
        check_fields(payload, FIELDS)?;
        let Payload { to, subject, body, html, cc, bcc, reply_to } =
            Payload::deserialize(payload).map_err(|_| PayloadError::new("", "can't be read as a mail's"))?;
        if subject.chars().any(char::is_control) {
            return Err(PayloadError::new("subject", "must hold no line breaks or other control characters"));
        }
        for (field, text) in [("body", Some(&body)), ("html", html.as_ref())] {
            if text.is_some_and(|text| text.contains('\0')) {
                return Err(PayloadError::new(field, "must hold no NUL"));
            }
        }
        let list = |field: &'static str, text: Option<String>| match text {
            // an empty optional list is what templates leave behind
            Some(text) if !text.is_empty() => parse_list(&text).map_err(|problem| PayloadError::new(field, problem)),
            _ => Ok(Vec::new()),
        };
        let mail = Self {
            to: parse_list(&to).map_err(|problem| PayloadError::new("to", problem))?,
            cc: list("cc", cc)?,
            bcc: list("bcc", bcc)?,
            reply_to: list("reply_to", reply_to)?,
            subject,
            body,
            html,
        };
        let count = mail.to.len() + mail.cc.len() + mail.bcc.len();
        if count > MAX_RECIPIENTS {
            return Err(PayloadError::new("to", format!("has with cc and bcc more than {MAX_RECIPIENTS} addresses")));
        }
        Ok(mail)
    }

    /// Who gets the mail, each address once. Domains compare without case, local parts with.
    pub(super) fn recipients(&self) -> Vec<Recipient> {
        let mut recipients: Vec<Recipient> = Vec::new();
        for (field, mailboxes) in [("to", &self.to), ("cc", &self.cc), ("bcc", &self.bcc)] {
            for (index, mailbox) in mailboxes.iter().enumerate() {
                let known = recipients.iter().any(|known| same_address(&known.address, &mailbox.email));
                if !known {
                    let place = format!("{field} {}", index + 1);
                    recipients.push(Recipient { address: mailbox.email.clone(), place });
                }
            }
        }
        recipients
    }

    /// Whether an address in it is written in other letters than ASCII, which only SMTPUTF8 (RFC 6531) can carry.
    pub(super) fn needs_smtputf8(&self, from: &Mailbox) -> bool {
        [&self.to, &self.cc, &self.bcc, &self.reply_to]
            .into_iter()
            .flatten()
            .chain([from])
            .any(|mailbox| !mailbox.email.user().is_ascii())
    }

    /// The message as it goes over the wire before dot-stuffing, lines ended by CRLF but for the last. The id is the
    /// same in every attempt; Bcc is not in it.
    ///
    /// # Errors
    /// Permanent `MessageInvalid` when it can't be written with lines of at most 998 octets.
    pub(super) fn formatted(&self, id: Uuid, from: &Mailbox) -> Result<Vec<u8>, Failure> {
        let invalid = |why: &str| Failure::permanent("MessageInvalid", format!("the mail can't be written: {why}"));
        let mut builder = Message::builder().from(from.clone()).header(MessageId::from(message_id(id, from)));
        builder = if self.subject.split(' ').all(|word| word.len() <= LONGEST_PLAIN_WORD || !word.is_ascii()) {
            builder.subject(self.subject.clone())
        } else {
            let name = HeaderName::new_from_ascii_str("Subject");
            builder.raw_header(HeaderValue::dangerous_new_pre_encoded(
                name,
                self.subject.clone(),
                encoded_words(&self.subject),
            ))
        };
        for mailbox in &self.to {
            builder = builder.to(mailbox.clone());
        }
        for mailbox in &self.cc {
            builder = builder.cc(mailbox.clone());
        }
        for mailbox in &self.reply_to {
            builder = builder.reply_to(mailbox.clone());
        }
        let plain = part(ContentType::TEXT_PLAIN, &self.body);
        let message = match &self.html {
            None => builder.singlepart(plain),
            Some(html) => builder
                .multipart(MultiPart::alternative().singlepart(plain).singlepart(part(ContentType::TEXT_HTML, html))),
        };
        let mut bytes = message.map_err(|_| invalid("its headers don't fit together"))?.formatted();
        if bytes.split(|&b| b == b'\n').any(|line| line.len() > MAX_LINE + 1) {
            return Err(invalid("a header has a word that is too long for a line"));
        }
        // the end of DATA brings its own CRLF
        if bytes.ends_with(b"\r\n") {
            bytes.truncate(bytes.len() - 2);
        }
        Ok(bytes)
    }
}

/// Text as encoded words of base64 (RFC 2047), each of at most 75 characters, on a line of its own. lettre folds at
/// spaces only, so a long ASCII word would stay one line.
fn encoded_words(text: &str) -> String {
    let mut words: Vec<String> = vec![String::new()];
    for c in text.chars() {
        match words.last_mut() {
            // 45 bytes are 60 characters of base64
            Some(word) if word.len() + c.len_utf8() <= 45 => word.push(c),
            _ => words.push(c.to_string()),
        }
    }
    let encoded = words.iter().map(|word| format!("=?utf-8?b?{}?=", STANDARD.encode(word)));
    encoded.collect::<Vec<_>>().join("\r\n ")
}

pub(super) fn message_id(id: Uuid, from: &Mailbox) -> String {
    format!("<{id}@{}>", from.email.domain())
}

pub(super) fn same_address(one: &Address, other: &Address) -> bool {
    one.user() == other.user() && one.domain().eq_ignore_ascii_case(other.domain())
}

/// A text part whose line ends, of whatever kind they were, are CRLF: a bare CR or LF on the wire is how one message
/// becomes two (SMTP smuggling).
fn part(content_type: ContentType, text: &str) -> SinglePart {
    let lines = text.replace("\r\n", "\n").replace('\r', "\n");
    SinglePart::builder().header(content_type).body(lines)
}
