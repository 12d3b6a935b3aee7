//! What happened on a path, so that a fault can show that it met something.

use super::condition::Condition;

/// What had happened on a path at some moment.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    pub passed_bytes: u64,
    /// Bytes that met a cut.
    pub held_bytes: u64,
    /// Chunks that latency or a narrow line made late.
    pub late_chunks: u64,
    /// Chunks that had to be sent again.
    pub lost_chunks: u64,
    /// Chunks that were held back until another connection's had passed.
    pub overtaken_chunks: u64,
    /// Connections that met a cut while they were being made.
    pub held_connections: u64,
    /// Connections that a cut has reset.
    pub resets: u64,
    /// Connections that broke by chance.
    pub breaks: u64,
    /// Connections that broke at a message.
    pub cut_messages: u64,
}

impl Counts {
    /// How much a condition has done since an earlier moment: only what this very condition does is counted, so that a cut
    /// is not shown by the slowness of another fault.
    pub fn done_by(&self, condition: &Condition, earlier: &Counts) -> u64 {
        let since = |of: fn(&Counts) -> u64| of(self).saturating_sub(of(earlier));
        let slow = !condition.delay.is_zero() || !condition.jitter.is_zero() || condition.bytes_per_s.is_some();
        let parts = [
            (condition.cut.is_some(), since(|c| c.held_bytes) + since(|c| c.held_connections) + since(|c| c.resets)),
            (slow, since(|c| c.late_chunks)),
            (condition.loss > 0.0, since(|c| c.lost_chunks)),
            (condition.reset > 0.0, since(|c| c.breaks)),
            (condition.reorder > 0.0, since(|c| c.overtaken_chunks)),
            (condition.at_message.is_some(), since(|c| c.cut_messages)),
        ];
        parts.into_iter().filter(|(meant, _)| *meant).map(|(_, done)| done).sum()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::condition::Cut;
    use super::*;

    #[test]
    fn a_fault_is_shown_by_what_it_does_and_by_nothing_else() {
        let slow = Condition { delay: Duration::from_millis(5), ..Condition::default() };
        let lossy = Condition { loss: 0.1, ..Condition::default() };
        let now = Counts { late_chunks: 9, lost_chunks: 2, passed_bytes: 100, ..Counts::default() };
        let before = Counts { late_chunks: 4, ..Counts::default() };
        assert_eq!(now.done_by(&slow, &before), 5);
        assert_eq!(now.done_by(&lossy, &before), 2);
        assert_eq!(now.done_by(&Condition::cut(Cut::Silent), &before), 0, "that it is slow there shows no cut");
        assert_eq!(now.done_by(&Condition::default(), &Counts::default()), 0);
    }
}
