//! Advantages: how much better a rollout did than its group. Each rollout counts once, however many segments it has.

use std::collections::BTreeMap;

use forebay_wire::{Advantage, AdvantageName, Gdpo};

use crate::credit::{self, Credited, Turn};

/// Added to the standard deviation, as in slime, so that equal values give 0 instead of a division by 0.
const STD_EPSILON: f64 = 1e-6;

/// The rollouts of a group that count in the baseline, in the order of their arrival.
#[derive(Clone, Debug, Default)]
pub struct Voters<'a> {
    pub rewards: Vec<f64>,
    /// Those reward components of each rollout that the rules read.
    pub components: Vec<&'a BTreeMap<String, f64>>,
    /// The turns of each rollout, if the rules compare turns.
    pub turns: Vec<&'a [Turn]>,
}

/// The advantages of the rollouts of a group, in the order of [`Voters`].
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Advantages {
    /// Of each rollout.
    pub of_rollouts: Vec<f64>,
    /// Of the turns of each rollout; empty if the rules do not compare turns.
    pub of_turns: Vec<Vec<f64>>,
}

/// Advantages of the rollouts of one group that count in the baseline, in their order.
///
/// - `grpo`: (R - mean) / (s + 1e-6), where s is the unbiased standard deviation (Shao et al. 2024); a single rollout
///   gets 0.
/// - `grpo_mean`: R - mean (Dr. GRPO, Liu et al. 2025).
/// - `rloo`: R - mean of the others (Ahmadian et al. 2024); a single rollout gets 0.
/// - `reward`: R. `none`, and `posted`, with which each token has its own: 0.
/// - `gdpo`: the weighted sum of `grpo` for each component, over the rollouts that have it (GDPO, arXiv 2601.05242); a
///   rollout has 0 for a component that it lacks. Whitening needs the batch: see [`standardized`].
/// - `turn_return`, `gigpo`: those of [`credit`]. A rollout as a whole has 0 with the first, and `A_E` with the second.
///
/// Each fits a 32-bit float. If sums of extreme rewards overflow, an advantage that is not a number becomes 0.
#[must_use]
pub fn advantages(estimator: &Advantage, voters: &Voters<'_>) -> Advantages {
    let of_rollouts = |estimates: Vec<f64>| Advantages {
        of_rollouts: estimates.into_iter().map(fit).collect(),
        of_turns: Vec::new(),
    };
    match estimator {
        Advantage::Named(name) => of_rollouts(by_reward(*name, &voters.rewards)),
        Advantage::Gdpo(gdpo) => of_rollouts(by_component(gdpo, &voters.components)),
        Advantage::TurnReturn(rule) => {
            let of_turns = credit::turn_return(rule, &credited(voters));
            Advantages { of_rollouts: vec![0.0; voters.rewards.len()], of_turns }
        }
        Advantage::Gigpo(rule) => {
            let (of_rollouts, of_turns) = credit::gigpo(rule, &credited(voters));
            Advantages { of_rollouts, of_turns }
        }
    }
}

fn credited<'a>(voters: &Voters<'a>) -> Vec<Credited<'a>> {
    voters.rewards.iter().zip(&voters.turns).map(|(&reward, &turns)| Credited { reward, turns }).collect()
}

/// (x - mean) / (s + 1e-6) of each value x, where s is the unbiased standard deviation; 0 for a single value. Each fits
/// a 32-bit float.
#[must_use]
pub fn standardized(values: &[f64]) -> Vec<f64> {
    if values.len() < 2 {
        return vec![0.0; values.len()];
    }
    let mean = mean(values);
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let std = (squares / (values.len() as f64 - 1.0)).sqrt();
    values.iter().map(|value| fit((value - mean) / (std + STD_EPSILON))).collect()
}

/// x - mean of each value x. Each fits a 32-bit float.
pub(crate) fn centred(values: &[f64]) -> Vec<f64> {
    let mean = mean(values);
    values.iter().map(|value| fit(value - mean)).collect()
}

fn by_reward(estimator: AdvantageName, rewards: &[f64]) -> Vec<f64> {
    let sum: f64 = rewards.iter().sum();
    match estimator {
        // With `posted`, each token has its own.
        AdvantageName::None | AdvantageName::Posted => vec![0.0; rewards.len()],
        AdvantageName::Reward => rewards.to_vec(),
        AdvantageName::Grpo => standardized(rewards),
        AdvantageName::GrpoMean => centred(rewards),
        AdvantageName::Rloo if rewards.len() < 2 => vec![0.0; rewards.len()],
        AdvantageName::Rloo => {
            let others = rewards.len() as f64 - 1.0;
            rewards.iter().map(|reward| reward - (sum - reward) / others).collect()
        }
    }
}

fn by_component(gdpo: &Gdpo, components: &[&BTreeMap<String, f64>]) -> Vec<f64> {
    let mut sums = vec![0.0; components.len()];
    for (name, weight) in &gdpo.components {
        let having = || components.iter().enumerate().filter_map(|(place, of)| Some((place, *of.get(name)?)));
        let values: Vec<f64> = having().map(|(_, value)| value).collect();
        for ((place, _), advantage) in having().zip(standardized(&values)) {
            sums[place] += weight * advantage;
        }
    }
    sums
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

pub(crate) fn fit(advantage: f64) -> f64 {
    // Adding 0 turns -0 into 0, as `Facts::reward` does.
    if advantage.is_nan() { 0.0 } else { advantage.clamp(f32::MIN.into(), f32::MAX.into()) + 0.0 }
}

#[cfg(test)]
mod tests {
    use forebay_wire::{GdpoKind, Whiten};

    use super::*;

    #[track_caller]
    fn same(found: &[f64], expected: &[f64]) {
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-7, "{found} is not {expected}");
        }
    }

    fn by_reward(estimator: AdvantageName, rewards: &[f64]) -> Vec<f64> {
        let voters = Voters { rewards: rewards.to_vec(), ..Voters::default() };
        advantages(&Advantage::Named(estimator), &voters).of_rollouts
    }

    #[track_caller]
    fn close(estimator: AdvantageName, rewards: &[f64], expected: &[f64]) {
        same(&by_reward(estimator, rewards), expected);
    }

    /// The advantages of rollouts with these rewards for accuracy and format.
    fn by_component(rollouts: &[(f64, Option<f64>)]) -> Vec<f64> {
        let of = |&(acc, fmt): &(f64, Option<f64>)| {
            let fmt = fmt.map(|fmt| ("fmt".to_owned(), fmt));
            [("acc".to_owned(), acc)].into_iter().chain(fmt).collect::<BTreeMap<_, _>>()
        };
        let components: Vec<_> = rollouts.iter().map(of).collect();
        let rewards = vec![0.0; rollouts.len()];
        let voters = Voters { rewards, components: components.iter().collect(), turns: Vec::new() };
        let weights = BTreeMap::from([("acc".to_owned(), 1.0), ("fmt".to_owned(), 0.5)]);
        let gdpo = Gdpo { kind: GdpoKind::Gdpo, components: weights, whiten: Whiten::Batch };
        advantages(&Advantage::Gdpo(gdpo), &voters).of_rollouts
    }

    #[test]
    fn worked_numbers_hold() {
        let rewards = [1.0, 0.0, 0.0, 0.5];
        close(AdvantageName::Grpo, &rewards, &[1.305_579_7, -0.783_347_8, -0.783_347_8, 0.261_115_9]);
        close(AdvantageName::GrpoMean, &rewards, &[0.625, -0.375, -0.375, 0.125]);
        close(AdvantageName::Rloo, &rewards, &[0.833_333_3, -0.5, -0.5, 0.166_666_7]);
        close(AdvantageName::Reward, &rewards, &rewards);
        close(AdvantageName::None, &rewards, &[0.0; 4]);
        close(AdvantageName::Grpo, &[1.0, 0.0], &[0.707_105_8, -0.707_105_8]);
    }

    #[test]
    fn worked_numbers_of_components_hold() {
        let first = by_component(&[(1.0, Some(1.0)), (1.0, Some(0.0)), (0.0, Some(1.0)), (0.0, Some(0.0))]);
        same(&first, &[1.299_035_9, 0.433_012, -0.433_012, -1.299_035_9]);
        let second = by_component(&[(1.0, Some(1.0)), (0.0, Some(1.0)), (0.0, Some(1.0)), (0.0, None)]);
        same(&second, &[1.499_997, -0.499_999, -0.499_999, -0.499_999]);
        let whitened = standardized(&[first, second].concat());
        same(&whitened[..4], &[1.322_874_5, 0.440_958_2, -0.440_958_2, -1.322_874_5]);
        same(&whitened[4..], &[1.527_523_4, -0.509_174_5, -0.509_174_5, -0.509_174_5]);
        // Nobody can be compared with the only rollout that has a component.
        same(&by_component(&[(0.5, Some(7.0)), (0.5, None)]), &[0.0, 0.0]);
        same(&by_component(&[]), &[]);
    }

    #[test]
    fn absurd_rewards_give_finite_advantages() {
        for estimator in [AdvantageName::Grpo, AdvantageName::GrpoMean, AdvantageName::Rloo, AdvantageName::Reward] {
            let found = by_reward(estimator, &[f64::MAX, f64::MAX, f64::MIN]);
            assert!(found.iter().all(|advantage| (*advantage as f32).is_finite()), "{estimator:?}: {found:?}");
        }
    }

    #[test]
    fn a_single_voter_has_nobody_to_compare_with() {
        for estimator in [AdvantageName::Grpo, AdvantageName::GrpoMean, AdvantageName::Rloo] {
            close(estimator, &[0.7], &[0.0]);
        }
        close(AdvantageName::Grpo, &[], &[]);
    }
}
