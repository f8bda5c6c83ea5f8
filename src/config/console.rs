//! The table `[console]`: what the live page shows besides the ledger.

use std::{collections::BTreeMap, path::PathBuf};

use forebay_api::routes::tokenizers::{TokenizerFile, Tokenizers};
use forebay_domain::access::globs::PolicyGlobs;
use forebay_wire::Violation;
use serde::Deserialize;

/// The most tokenizers: more than a service has policies with tokenizers of their own.
const TOKENIZERS_MAX: usize = 64;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Console {
    /// Paths of tokenizer files by patterns of policy names.
    tokenizers: BTreeMap<String, PathBuf>,
}

impl Console {
    /// The tokenizers, without reading their files.
    pub(super) fn tokenizers(self, violations: &mut Vec<Violation>) -> Tokenizers {
        if self.tokenizers.len() > TOKENIZERS_MAX {
            let detail = format!("must have at most {TOKENIZERS_MAX} entries");
            violations.push(Violation { pointer: "/console/tokenizers".to_owned(), detail });
        }
        let mut files = Vec::new();
        for (pattern, path) in self.tokenizers {
            match PolicyGlobs::parse(&[&pattern]) {
                Ok(policies) => files.push(TokenizerFile { policies, path }),
                Err((_, error)) => violations.push(Violation { pointer: pointer(&pattern), detail: error.to_string() }),
            }
        }
        Tokenizers::new(files)
    }
}

/// The pointer of an entry in the file.
pub(super) fn pointer(pattern: &str) -> String {
    format!("/console/tokenizers/{}", pattern.replace('~', "~0").replace('/', "~1"))
}
