//! Who waits for what: in this process ([`wakers`], [`waiter_slots`]), at other replicas ([`replicas`]), and as the ledger
//! shows it ([`consumers`]).

pub mod consumers;
pub mod replicas;
pub mod waiter_slots;
pub mod wakers;
