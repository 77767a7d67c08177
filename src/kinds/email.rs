//! `send_email`: one mail to all its recipients over the operator's SMTP server.
//!
//! Each recipient has an outcome of its own: taken, refused for good (5xx), or put off (4xx). What is decided is kept
//! as the attempt's progress, so that a retry mails only those who have not got it. The Message-ID comes from the job,
//! so a copy sent twice can be recognised. From DATA on an attempt is committed: it is neither cut short by a cancel
//! nor handed back, and when the connection breaks before the server's last word, the failure says that the mail may
//! have arrived.

mod address;
mod message;
mod session;
mod settings;
mod stream;
#[cfg(test)]
mod tests;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

pub use settings::SmtpSettings;

use self::message::{Mail, Recipient, message_id};
use self::session::{Answer, Session};
use super::payload::PayloadError;
use super::{Attempt, Executed, Executor, Failure, SettingsError};

pub const KIND: &str = "send_email";

pub struct SendEmail {
    smtp: Option<SmtpSettings>,
    roots: Option<lettre::transport::smtp::client::Certificate>,
}

/// What earlier attempts have settled. Kept in the row, never shown.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
struct Progress {
    /// Addresses whose copy the server has taken.
    delivered: Vec<String>,
    refused: Vec<Refused>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Refused {
    address: String,
    /// The server's reply code, with its enhanced code when it gave one.
    code: String,
}

/// How one round with the server went for each recipient that was still open.
#[derive(Debug, Default)]
struct Round {
    taken: Vec<Recipient>,
    refused: Vec<(Recipient, String)>,
    put_off: Vec<(Recipient, String)>,
}

impl SendEmail {
    /// # Errors
    /// When the extra CA certificates are not PEM.
    pub fn new(smtp: Option<SmtpSettings>, extra_roots: Option<&[u8]>) -> Result<Self, SettingsError> {
        let roots = extra_roots
            .map(lettre::transport::smtp::client::Certificate::from_pem)
            .transpose()
            .map_err(|_| SettingsError::new("the extra CA certificates are not PEM"))?;
        Ok(Self { smtp, roots })
    }

    async fn send(&self, attempt: &Attempt) -> Executed {
        let Some(smtp) = &self.smtp else {
            return Err(Failure::passing("NotConfigured", "this install has no mail server: set JOBREQUEST_SMTP_URL"));
        };
        let mail = attempt.checked(Mail::parse)?;
        let mut progress = Progress::of(attempt);
        let recipients = mail.recipients();
        let open = recipients.iter().filter(|recipient| !progress.settles(recipient)).cloned().collect::<Vec<_>>();
        let mut put_off = Vec::new();
        if !open.is_empty() {
            let exchange = self.exchange(smtp, attempt, &mail, open);
            let round = match tokio::time::timeout_at(attempt.soft_deadline(), exchange).await {
                Ok(round) => round,
                Err(_) if attempt.is_committed() => Err(uncertain("the attempt's time was over")),
                Err(_) => Err(Failure::passing("Timeout", "the mail server took longer than the attempt's time")),
            };
            match round {
                Ok(round) => put_off = progress.absorb(round),
                Err(failure) => return Err(failure.with_progress(progress.to_json())),
            }
        }
        progress.outcome(&recipients, &put_off, &message_id(attempt.job_id, &smtp.from))
    }

    /// One conversation with the server. An error here settles nothing for anybody.
    async fn exchange(
        &self,
        smtp: &SmtpSettings,
        attempt: &Attempt,
        mail: &Mail,
        open: Vec<Recipient>,
    ) -> Result<Round, Failure> {
        let bytes = mail.formatted(attempt.job_id, &smtp.from)?;
        let utf8 = mail.needs_smtputf8(&smtp.from);
        let prepare = async {
            let mut session = Session::open(smtp, self.roots.as_ref()).await?;
            session.mail_from(&smtp.from.email, utf8).await?;
            let mut round = Round::default();
            for recipient in open {
                match session.rcpt_to(&recipient.address).await? {
                    Answer::Taken => round.taken.push(recipient),
                    Answer::Refused(code) => round.refused.push((recipient, code)),
                    Answer::PutOff(code) => round.put_off.push((recipient, code)),
                }
            }
            Ok((session, round))
        };
        let (mut session, mut round) = attempt.unless_stopped(prepare).await?;
        attempt.checkpoint()?;
        if !round.taken.is_empty() {
            attempt.commit();
            match session.data(&bytes).await? {
                Answer::Taken => {}
                Answer::Refused(code) => {
                    round.refused.extend(round.taken.drain(..).map(|recipient| (recipient, code.clone())));
                }
                Answer::PutOff(code) => {
                    round.put_off.extend(round.taken.drain(..).map(|recipient| (recipient, code.clone())));
                }
            }
        }
        session.quit().await;
        Ok(round)
    }
}

impl Executor for SendEmail {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn execute<'a>(&'a self, attempt: &'a Attempt) -> BoxFuture<'a, Executed> {
        self.send(attempt).boxed()
    }
}

pub(super) fn validate(payload: &Value) -> Result<(), PayloadError> {
    Mail::parse(payload).map(drop)
}

/// The server may have the mail or not: only it knows.
fn uncertain(why: &str) -> Failure {
    Failure::passing(
        "OutcomeUncertain",
        format!(
            "{why} after the mail was sent and before the server confirmed it: it may have arrived, and a retry \
                 sends it again under the same Message-ID"
        ),
    )
}

impl Progress {
    /// Progress that can't be read settles nothing: a second copy is better than none.
    fn of(attempt: &Attempt) -> Self {
        attempt.progress.as_ref().and_then(|kept| Self::deserialize(kept).ok()).unwrap_or_default()
    }

    fn to_json(&self) -> Value {
        json!(self)
    }

    fn settles(&self, recipient: &Recipient) -> bool {
        self.delivered
            .iter()
            .chain(self.refused.iter().map(|refused| &refused.address))
            .any(|settled| settled == recipient.address.as_ref() as &str)
    }

    /// Takes over what a round has settled and gives back what it has not.
    fn absorb(&mut self, Round { taken, refused, put_off }: Round) -> Vec<(Recipient, String)> {
        self.delivered.extend(taken.into_iter().map(|recipient| recipient.address.to_string()));
        self.refused.extend(
            refused.into_iter().map(|(recipient, code)| Refused { address: recipient.address.to_string(), code }),
        );
        put_off
    }

    /// All have it: the result. Some are put off: passing. Some are refused and nobody is put off: permanent, and the
    /// text says how many have it nevertheless.
    fn outcome(&self, recipients: &[Recipient], put_off: &[(Recipient, String)], message_id: &str) -> Executed {
        let total = recipients.len();
        if put_off.is_empty() && self.refused.is_empty() {
            return Ok(json!({"message_id": message_id, "delivered": self.delivered.len()}));
        }
        let refused = recipients.iter().filter_map(|recipient| {
            let found = self.refused.iter().find(|refused| refused.address == recipient.address.as_ref() as &str)?;
            Some(format!("{} ({})", recipient.place, found.code))
        });
        let refused = list(refused);
        let delivered = self.delivered.len();
        let failure = if put_off.is_empty() {
            Failure::permanent(
                "RecipientsRefused",
                format!("{delivered} of {total} recipients have the mail; the server refused {refused}"),
            )
        } else {
            let waiting = list(put_off.iter().map(|(recipient, code)| format!("{} ({code})", recipient.place)));
            let also = if refused.is_empty() { String::new() } else { format!("; it refused {refused}") };
            Failure::passing(
                "RecipientsPutOff",
                format!("{delivered} of {total} recipients have the mail; the server put off {waiting}{also}"),
            )
        };
        Err(failure.with_progress(self.to_json()))
    }
}

/// At most ten, so that a status stays readable.
fn list(items: impl Iterator<Item = String>) -> String {
    let items: Vec<String> = items.collect();
    match items.len().checked_sub(10) {
        None | Some(0) => items.join(", "),
        Some(more) => format!("{} and {more} more", items[..10].join(", ")),
    }
}
