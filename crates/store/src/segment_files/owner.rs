//! The owner of the objects in a folder: the one database that may remove them and add to them.
//!
//! Separate from the objects, because it is about databases. A copy of a database names the same objects. If it removed
//! those that it does not know or need, its original would lose them. So the database records who it is, and an object
//! in the folder repeats it. What tells a copy from its original is the identity, which neither `pg_dump` nor
//! `CREATE DATABASE ... TEMPLATE` copies. A copy of the server's files has the same identity. It is told by the fence,
//! which rises with every proof: the object has a higher one than an earlier state of the database.
//!
//! Every proof raises the fence by a random step, first in the database. Whoever owned the objects before and finds a
//! higher one marks the owner object as contested, and then neither of the two removes anything. The object is replaced
//! only if it has not changed since it was read (`If-Match`), so a proof does not undo an adoption. A proof is good for
//! a hundred removals, which begin within 20 s; so the last removal of a former owner ends within a minute after the
//! adoption, and the adopting database waits for nothing. New payloads of a database that is not the owner go into the
//! database, because the owner would remove its objects as those of failed transactions.

use object_store::{Error, ObjectStoreExt as _, PutMode, PutOptions, PutPayload, UpdateVersion, path::Path};
use serde::{Deserialize, Serialize};

use super::object::{ObjectError, Objects, bounded};

/// The name of the owner object. It is no number in hexadecimal, as the names of all other objects are.
const NAME: &str = "owner";

/// The largest step of a fence. Steps are random, so that two copies of a server's files do not rise alike.
const FENCE_STEP_MAX: i64 = 1 << 20;

/// An owner, as the database and the object record it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    /// The server and the database in it.
    pub(crate) identity: String,
    /// A random number, new with each adoption.
    pub(crate) incarnation: i64,
    /// It rises with each proof, first in the database.
    pub(crate) fence: i64,
    /// Only in the object: another process with the same identity has found a fence that its database did not write.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) is_contested: bool,
}

/// An owner object that was read.
#[derive(Clone, Debug)]
pub(crate) struct FoundOwner {
    pub(crate) owner: Owner,
    /// It changes whenever the object is written.
    version: UpdateVersion,
}

/// What a database is to the objects in its folder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// Nobody owns them yet.
    Unclaimed,
    /// The database owns them.
    Owner,
    /// Another database owns them: this one is a copy, was moved to another server, or the other one has adopted them.
    Other,
    /// A later state of this database owns them: this one was restored, or is a copy of the server's files.
    Earlier,
    /// Two servers with the same files use them.
    Contested,
}

impl Standing {
    /// Compares the identity of a database, what it has recorded, and what the owner object says.
    pub(crate) fn of(identity: &str, recorded: Option<&Owner>, found: Option<&Owner>) -> Self {
        match (recorded, found) {
            (Some(recorded), _) if recorded.identity != identity => Self::Other,
            (_, None) => Self::Unclaimed,
            (None, Some(_)) => Self::Other,
            (Some(recorded), Some(found)) if !recorded.is_same(found) => Self::Other,
            (Some(_), Some(found)) if found.is_contested => Self::Contested,
            (Some(recorded), Some(found)) if found.fence > recorded.fence => Self::Earlier,
            (Some(_), Some(_)) => Self::Owner,
        }
    }

    /// Why the database does not own its objects.
    pub(crate) fn why(self) -> &'static str {
        match self {
            Self::Owner => "this database owns them",
            Self::Unclaimed => "the owner object was removed; it is written again",
            Self::Other => "another database owns them: this one is a copy, was moved, or the other one adopted them",
            Self::Earlier => {
                "a later state of this database owns them: this one was restored, or its files were copied"
            }
            Self::Contested => "two servers with copies of the same files use them",
        }
    }
}

impl Owner {
    /// A new owner, whose fence is not below that of the owner before it.
    pub(crate) fn new(identity: &str, before: Option<&Self>) -> Self {
        let incarnation = rand::random_range(1..=i64::MAX);
        let fence = before.map_or(0, |before| before.fence);
        Self { identity: identity.to_owned(), incarnation, fence, is_contested: false }
    }

    fn is_same(&self, other: &Self) -> bool {
        (&self.identity, self.incarnation) == (&other.identity, other.incarnation)
    }
}

/// By how much a fence rises.
pub(crate) fn fence_step() -> i64 {
    rand::random_range(1..=FENCE_STEP_MAX)
}

impl Objects {
    /// The owner object, if there is one.
    pub(crate) async fn owner(&self) -> Result<Option<FoundOwner>, ObjectError> {
        let path = self.owner_path();
        let read = async {
            let found = match self.store.get(&path).await {
                Err(Error::NotFound { .. }) => return Ok(None),
                found => found?,
            };
            let version = UpdateVersion { e_tag: found.meta.e_tag.clone(), version: found.meta.version.clone() };
            let owner = serde_json::from_slice(&found.bytes().await?);
            let owner = owner.map_err(|error| Error::Generic { store: "owner object", source: error.into() })?;
            Ok(Some(FoundOwner { owner, version }))
        };
        bounded("read", &path, read).await
    }

    /// Writes the owner object if there is none. Of several databases that do this at once, one succeeds.
    pub(crate) async fn create_owner(&self, owner: &Owner) -> Result<(), ObjectError> {
        let (path, options) = (self.owner_path(), PutOptions::from(PutMode::Create));
        let create = async {
            match self.store.put_opts(&path, content(owner), options).await {
                Err(Error::AlreadyExists { .. }) => Ok(()),
                // Not every store can refuse to replace an object.
                Err(Error::NotImplemented { .. }) => self.store.put(&path, content(owner)).await.map(drop),
                created => created.map(drop),
            }
        };
        bounded("write", &path, create).await
    }

    /// Writes the owner object, unless it has changed since it was found: then it stays as it is, and the answer is false.
    /// So whoever proves that he owns the objects cannot undo an adoption that he has not seen.
    pub(crate) async fn replace_owner(&self, found: &FoundOwner, owner: &Owner) -> Result<bool, ObjectError> {
        let path = self.owner_path();
        let options = PutOptions::from(PutMode::Update(found.version.clone()));
        let replace = async {
            match self.store.put_opts(&path, content(owner), options).await {
                Err(Error::Precondition { .. }) => Ok(Some(false)),
                Err(Error::NotImplemented { .. }) => Ok(None),
                replaced => replaced.map(|_| Some(true)),
            }
        };
        if let Some(replaced) = bounded("write", &path, replace).await? {
            return Ok(replaced);
        }
        // A folder cannot compare and replace in one step. An adoption between these two steps would be undone.
        if self.owner().await?.is_none_or(|now| now.owner != found.owner) {
            return Ok(false);
        }
        self.write_owner(owner).await.map(|()| true)
    }

    /// Writes the owner object, whatever it was.
    pub(crate) async fn write_owner(&self, owner: &Owner) -> Result<(), ObjectError> {
        let path = self.owner_path();
        let write = async { self.store.put(&path, content(owner)).await.map(drop) };
        bounded("write", &path, write).await
    }

    fn owner_path(&self) -> Path {
        self.folder.clone().join(NAME)
    }
}

fn content(owner: &Owner) -> PutPayload {
    serde_json::to_vec(owner).expect("an owner is JSON").into()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(fence: i64) -> Owner {
        Owner { identity: "7/1".to_owned(), incarnation: 5, fence, is_contested: false }
    }

    #[test]
    fn only_the_database_that_recorded_itself_last_is_the_owner() {
        let standing = |recorded: &Owner, found: &Owner| Standing::of("7/1", Some(recorded), Some(found));
        assert_eq!(standing(&owner(3), &owner(3)), Standing::Owner);
        assert_eq!(standing(&owner(4), &owner(3)), Standing::Owner, "the database is written first");
        assert_eq!(standing(&owner(2), &owner(3)), Standing::Earlier);
        assert_eq!(standing(&owner(3), &Owner { incarnation: 6, ..owner(3) }), Standing::Other);
        assert_eq!(standing(&owner(3), &Owner { identity: "7/2".to_owned(), ..owner(3) }), Standing::Other);
        assert_eq!(standing(&owner(3), &Owner { is_contested: true, ..owner(3) }), Standing::Contested);
        assert_eq!(Standing::of("7/2", Some(&owner(3)), Some(&owner(3))), Standing::Other, "a copy");
        assert_eq!(Standing::of("7/2", Some(&owner(3)), None), Standing::Other, "a copy whose original owns nothing");
        assert_eq!(Standing::of("7/1", None, Some(&owner(3))), Standing::Other);
        assert_eq!(Standing::of("7/1", Some(&owner(3)), None), Standing::Unclaimed);
        assert_eq!(Standing::of("7/1", None, None), Standing::Unclaimed);
    }

    /// Every version reads what an earlier one wrote.
    #[test]
    fn the_owner_object_stays_readable() {
        let text = r#"{"identity":"7/1","incarnation":5,"fence":3}"#;
        assert_eq!(serde_json::to_string(&owner(3)).expect("an owner is JSON"), text);
        assert_eq!(serde_json::from_str::<Owner>(text).expect("it is valid"), owner(3));
        let contested = serde_json::to_string(&Owner { is_contested: true, ..owner(3) }).expect("an owner is JSON");
        assert_eq!(contested, r#"{"identity":"7/1","incarnation":5,"fence":3,"is_contested":true}"#);
    }
}
