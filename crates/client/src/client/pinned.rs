//! Verification of a service's certificate against certificates that the user names.
//!
//! This is separate because webpki alone refuses the most common self-signed certificate: `openssl req -x509` marks its
//! certificate as a certificate authority, and webpki does not accept an authority as the certificate of a service.

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

use super::{error::ClientError, options::unusable};

/// Accepts a certificate if one of the named certificates signed it, or if it is one of the named certificates.
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
    /// For a named certificate that is marked as an authority, webpki checks the validity period before it reports the
    /// mark, and later checks the handshake's signature. The server name is checked here. No signature by an authority
    /// is needed, because the user named the certificate itself.
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        match self.webpki.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(error) if is_named_authority(&error, end_entity, &self.named) => {
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

/// Whether the only thing wrong with a certificate is that it is marked as an authority's, and it is one of the named
/// certificates. The service asks the same of the certificates of its clients.
pub fn is_named_authority(error: &Error, certificate: &CertificateDer<'_>, named: &[CertificateDer<'_>]) -> bool {
    let Error::InvalidCertificate(error) = error else { return false };
    is_an_authority(error) && named.iter().any(|named| named == certificate)
}

fn is_an_authority(error: &CertificateError) -> bool {
    let CertificateError::Other(other) = error else { return false };
    matches!(other.0.downcast_ref::<webpki::Error>(), Some(webpki::Error::CaUsedAsEndEntity))
}

/// Describes the problem with a service's certificate and says how to fix it.
pub(super) fn describe(error: &CertificateError) -> String {
    match error {
        CertificateError::UnknownIssuer => {
            "no trusted certificate authority has signed it: give the authority's certificate, or this certificate itself, in the CA file"
                .to_owned()
        }
        error if is_an_authority(error) => {
            "it is marked as a certificate authority (CA:TRUE) and is not in the CA file: add it to the CA file"
                .to_owned()
        }
        error => error.to_string(),
    }
}
