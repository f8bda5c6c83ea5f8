//! What a session remembers of its calls for the receipts of its rollouts, also of calls that were refused and have no rows.

use std::ops::BitOr;

use crate::{surrogates, warnings::Warning};

/// A set of notes. The numbers are stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionNotes(u32);

impl SessionNotes {
    /// A text of a call had half of a surrogate pair.
    pub const LONE_SURROGATES: Self = Self(1);
    /// A call was refused because of a part of a message that sessions cannot record.
    pub const UNSUPPORTED_PART: Self = Self(2);
    /// An image of a call became a text.
    pub const IMAGES_REPLACED: Self = Self(4);

    /// The set with this stored number.
    #[must_use]
    pub fn of_number(number: u32) -> Self {
        Self(number)
    }

    /// The number that is stored.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// Whether all of these are in the set.
    #[must_use]
    pub fn has(self, notes: Self) -> bool {
        self.0 & notes.0 == notes.0
    }

    pub fn warnings(self) -> Vec<Warning> {
        let unsupported = || {
            let detail = "a call was refused because of a part of a message that sessions cannot record; unless the finish \
                          says otherwise, the rollout is aborted";
            Warning::new("unsupported-part", detail)
        };
        let images = || Warning::new("images-replaced", "the model was shown a text in the place of each image");
        [
            self.has(Self::LONE_SURROGATES).then(|| surrogates::warning("texts of calls")),
            self.has(Self::UNSUPPORTED_PART).then(unsupported),
            self.has(Self::IMAGES_REPLACED).then(images),
        ]
        .into_iter()
        .flatten()
        .collect()
    }
}

impl BitOr for SessionNotes {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_stored_numbers_stay() {
        let all = [SessionNotes::LONE_SURROGATES, SessionNotes::UNSUPPORTED_PART, SessionNotes::IMAGES_REPLACED];
        assert_eq!(all.map(SessionNotes::number), [1, 2, 4]);
        let both = SessionNotes::of_number(5);
        assert!(
            both.has(all[0]) && both.has(all[2]) && !both.has(all[1] | all[0]) && both.has(SessionNotes::default())
        );
        let names: Vec<_> = SessionNotes::of_number(7).warnings().iter().map(|warning| warning.name).collect();
        assert_eq!(names, ["lone-surrogates", "unsupported-part", "images-replaced"]);
    }
}
