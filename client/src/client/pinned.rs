//! Certificates that a user names, with which a service proves who it is.
//!
//! It is separate because webpki alone does not accept the most usual one: `openssl req -x509` marks the certificate
//! that it makes as an authority, and webpki refuses an authority as the certificate of a service.

use std::sync::Arc;

use rustls::{
    CertificateError, DigitallySignedStruct, Error, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
        verify_server_name,
    },
    crypto::CryptoProvider,
    pki_types::{CertificateDer, ServerName, UnixTime},
    server::ParsedCertificate,
};

use super::{ClientError, options::unusable};

/// Verifies that a certificate is signed by one of the named certificates, or is one of them.
#[derive(Debug)]
pub(super) struct PinnedVerifier {
    named: Vec<CertificateDer<'static>>,
    webpki: Arc<WebPkiServerVerifier>,
}

impl PinnedVerifier {
    pub(super) fn new(named: Vec<CertificateDer<'static>>, provider: Arc<CryptoProvider>) -> Result<Self, ClientError> {
        let mut roots = RootCertStore::empty();
        for certificate in &named {
            roots.add(certificate.clone()).map_err(|error| unusable(&error))?;
        }
        let webpki = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build();
        Ok(Self { named, webpki: webpki.map_err(|error| unusable(&error))? })
    }
}

impl ServerCertVerifier for PinnedVerifier {
    /// Of a named certificate that is an authority, webpki checks the time before it complains about that, and the
    /// handshake's signature afterwards; the name is checked here. Nobody has to have signed what the user named.
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.webpki.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(error) if is_an_authority(&error) && self.named.iter().any(|named| named == end_entity) => {
                verify_server_name(&ParsedCertificate::try_from(end_entity)?, server_name)?;
                Ok(ServerCertVerified::assertion())
            }
            outcome => outcome,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.webpki.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.webpki.supported_verify_schemes()
    }
}

/// Whether the only complaint is that the certificate is an authority's.
fn is_an_authority(error: &Error) -> bool {
    let Error::InvalidCertificate(CertificateError::Other(other)) = error else { return false };
    matches!(other.0.downcast_ref::<webpki::Error>(), Some(webpki::Error::CaUsedAsEndEntity))
}

/// What is wrong with a service's certificate, in words that say what to do.
pub(super) fn describe(error: &CertificateError) -> String {
    let is_an_authority = match error {
        CertificateError::Other(other) => {
            matches!(other.0.downcast_ref::<webpki::Error>(), Some(webpki::Error::CaUsedAsEndEntity))
        }
        _ => false,
    };
    match error {
        CertificateError::UnknownIssuer => {
            "no authority that is believed has signed it: name the authority, or the certificate itself, as the CA file"
                .to_owned()
        }
        _ if is_an_authority => {
            "it is marked as an authority (CA:TRUE), and it is not one of those in the CA file: name it there"
                .to_owned()
        }
        error => error.to_string(),
    }
}
