//! The server's side of TLS, with the certificates of tests/data/tls.

use std::sync::Arc;

use rustls::ServerConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

/// What clients trust.
pub const ROOT: &[u8] = include_bytes!("../data/tls/root.pem");
pub const GOOD: &[u8] = include_bytes!("../data/tls/good.pem");
pub const WRONG_NAME: &[u8] = include_bytes!("../data/tls/wrong_name.pem");
pub const EXPIRED: &[u8] = include_bytes!("../data/tls/expired.pem");
pub const STRANGER: &[u8] = include_bytes!("../data/tls/stranger.pem");

pub fn acceptor(certificate: &[u8]) -> TlsAcceptor {
    drop(rustls::crypto::aws_lc_rs::default_provider().install_default());
    let chain = vec![CertificateDer::from_pem_slice(certificate).unwrap()];
    let key = PrivateKeyDer::from_pem_slice(include_bytes!("../data/tls/key.pem")).unwrap();
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(chain, key).unwrap();
    TlsAcceptor::from(Arc::new(config))
}
