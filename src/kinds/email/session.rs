//! One conversation with an SMTP server, verb by verb, over lettre's connection.
//!
//! lettre's own transport gives up at the first refused recipient; here each RCPT has its answer. Of what a server says
//! only the codes are kept: reply texts repeat addresses.

use std::net::SocketAddr;
use std::time::Duration;

use lettre::Address;
use lettre::transport::smtp::Error;
use lettre::transport::smtp::authentication::Mechanism;
use lettre::transport::smtp::client::{AsyncSmtpConnection, AsyncTokioStream, Certificate, TlsParameters};
use lettre::transport::smtp::commands::{Data, Mail, Rcpt};
use lettre::transport::smtp::extension::{Extension, MailBodyParameter, MailParameter};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

use super::settings::{SmtpSettings, Tls};
use super::stream::{Bounded, Encrypted};
use super::uncertain;
use crate::kinds::Failure;

/// How long a polite goodbye may take.
const QUIT_WITHIN: Duration = Duration::from_secs(1);
/// For each address, so that one dead address of a server with several costs little.
const CONNECT_WITHIN: Duration = Duration::from_secs(30);

pub(super) struct Session {
    connection: AsyncSmtpConnection,
}

/// What the server says to one step, the codes as text: `450 4.2.1`.
pub(super) enum Answer {
    Taken,
    /// 5xx
    Refused(String),
    /// 4xx
    PutOff(String),
}

impl Session {
    /// Connects, encrypts as set, and authenticates.
    ///
    /// # Errors
    /// Passing `SmtpUnavailable`, `SmtpTlsFailed` or `SmtpAuthFailed`: what is wrong here is the operator's to mend.
    pub(super) async fn open(smtp: &SmtpSettings, roots: Option<&Certificate>) -> Result<Self, Failure> {
        let tls = || {
            let mut builder = TlsParameters::builder(smtp.host.clone());
            if let Some(roots) = roots {
                builder = builder.add_root_certificate(roots.clone());
            }
            builder.build().map_err(|error| broken("SmtpTlsFailed", "TLS with the mail server can't start", &error))
        };
        let (wrapped, starttls) = match smtp.tls {
            Tls::Plain => (None, None),
            Tls::Upgraded => (None, Some(tls()?)),
            Tls::Implicit => (Some(tls()?), None),
        };
        let unavailable = |error: &Error| broken("SmtpUnavailable", "the mail server can't be reached", error);
        let (tcp, peer) = connect(smtp).await?;
        let stream: Box<dyn AsyncTokioStream> = match wrapped {
            None => Box::new(Bounded::new(tcp, peer)),
            Some(parameters) => {
                let tls = Encrypted::over(tcp, parameters)
                    .await
                    .map_err(|error| broken("SmtpTlsFailed", "TLS with the mail server failed", &error))?;
                Box::new(Bounded::new(tls, peer))
            }
        };
        let mut connection = AsyncSmtpConnection::connect_with_transport(stream, &smtp.hello_name)
            .await
            .map_err(|error| unavailable(&error))?;
        if let Some(parameters) = starttls {
            if !connection.can_starttls() {
                return Err(Failure::passing(
                    "SmtpTlsFailed",
                    "the mail server offers no STARTTLS, which is required; nothing was sent",
                ));
            }
            connection
                .starttls(parameters, &smtp.hello_name)
                .await
                .map_err(|error| broken("SmtpTlsFailed", "STARTTLS with the mail server failed", &error))?;
        }
        if let Some(credentials) = &smtp.credentials {
            connection
                .auth(&[Mechanism::Plain, Mechanism::Login], credentials)
                .await
                .map_err(|error| broken("SmtpAuthFailed", "the mail server did not accept the credentials", &error))?;
        }
        Ok(Self { connection })
    }

    /// # Errors
    /// Permanent `SmtpUtf8NotOffered` or `SenderRefused`, passing otherwise.
    pub(super) async fn mail_from(&mut self, from: &Address, utf8: bool) -> Result<(), Failure> {
        let mut parameters = Vec::new();
        if utf8 {
            let server = self.connection.server_info();
            if !server.supports_feature(Extension::SmtpUtfEight) || !server.supports_feature(Extension::EightBitMime) {
                return Err(Failure::permanent(
                    "SmtpUtf8NotOffered",
                    "an address has letters other than ASCII before its @, which the mail server can't carry (it \
                     offers no SMTPUTF8)",
                ));
            }
            parameters.push(MailParameter::SmtpUtfEight);
            parameters.push(MailParameter::Body(MailBodyParameter::EightBitMime));
        }
        match self.step(Mail::new(Some(from.clone()), parameters)).await? {
            Answer::Taken => Ok(()),
            Answer::Refused(code) => {
                Err(Failure::permanent("SenderRefused", format!("the mail server refused the sender ({code})")))
            }
            Answer::PutOff(code) => {
                Err(Failure::passing("SmtpUnavailable", format!("the mail server put the sender off ({code})")))
            }
        }
    }

    /// # Errors
    /// Passing `SmtpUnavailable` when the conversation broke.
    pub(super) async fn rcpt_to(&mut self, address: &Address) -> Result<Answer, Failure> {
        self.step(Rcpt::new(address.clone(), Vec::new())).await
    }

    /// Sends the message. The answer holds for all recipients that were taken.
    ///
    /// # Errors
    /// Passing: `SmtpUnavailable` when it broke before the message was sent, `OutcomeUncertain` after.
    pub(super) async fn data(&mut self, message: &[u8]) -> Result<Answer, Failure> {
        match self.connection.command(Data).await {
            Ok(reply) if reply.has_code(354) => {}
            Ok(_) => return Err(Failure::passing("SmtpUnavailable", "the mail server did not ask for the mail")),
            Err(error) => return answer(&error).ok_or_else(|| gone(&error)),
        }
        match self.connection.message(message).await {
            Ok(_) => Ok(Answer::Taken),
            Err(error) => answer(&error).ok_or_else(|| uncertain("the connection to the mail server broke")),
        }
    }

    /// Says goodbye if that takes no time. Nothing depends on it.
    pub(super) async fn quit(mut self) {
        let _ = timeout(QUIT_WITHIN, self.connection.quit()).await;
    }

    async fn step(&mut self, command: impl std::fmt::Display) -> Result<Answer, Failure> {
        match self.connection.command(command).await {
            Ok(_) => Ok(Answer::Taken),
            Err(error) => answer(&error).ok_or_else(|| gone(&error)),
        }
    }
}

/// To the first address of the server that takes a connection.
async fn connect(smtp: &SmtpSettings) -> Result<(TcpStream, SocketAddr), Failure> {
    let failed = |why: &dyn std::fmt::Display| {
        Failure::passing("SmtpUnavailable", format!("the mail server can't be reached: {why}"))
    };
    let addresses = lookup_host((smtp.host.as_str(), smtp.port)).await.map_err(|error| failed(&error))?;
    let mut last = failed(&"its name has no address");
    for address in addresses {
        match timeout(CONNECT_WITHIN, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => return Ok((stream, address)),
            Ok(Err(error)) => last = failed(&error),
            Err(_) => last = failed(&"it did not answer in time"),
        }
    }
    Err(last)
}

/// The server's own word, when the error is one.
fn answer(error: &Error) -> Option<Answer> {
    let code = codes(error)?;
    if error.is_permanent() { Some(Answer::Refused(code)) } else { Some(Answer::PutOff(code)) }
}

/// The reply code and, when the text begins with one, the enhanced code (RFC 3463).
fn codes(error: &Error) -> Option<String> {
    let code = error.status()?;
    let text = std::error::Error::source(error).map(ToString::to_string).unwrap_or_default();
    let enhanced = text.split_whitespace().next().filter(|word| is_enhanced_code(word));
    Some(enhanced.map_or_else(|| code.to_string(), |enhanced| format!("{code} {enhanced}")))
}

fn is_enhanced_code(word: &str) -> bool {
    let mut parts = word.split('.');
    matches!(parts.next(), Some("2" | "4" | "5"))
        && (0..2).all(|_| {
            parts.next().is_some_and(|part| (1..=3).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit()))
        })
        && parts.next().is_none()
}

fn gone(error: &Error) -> Failure {
    broken("SmtpUnavailable", "the conversation with the mail server broke off", error)
}

fn broken(reason: &'static str, what: &str, error: &Error) -> Failure {
    let why = if let Some(code) = codes(error) {
        code
    } else if error.is_response() {
        "it answered something that is not SMTP".to_owned()
    } else if error.is_timeout() {
        "it did not answer in time".to_owned()
    } else {
        crate::kinds::egress::root_cause(error)
    };
    Failure::passing(reason, format!("{what}: {why}"))
}
