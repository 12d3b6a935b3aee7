//! A whole history, with each invocation joined to its end.

use std::collections::HashMap;

use super::action::Action;
use super::fault::Fault;
use super::operation::{Kind, Operation, Process};
use super::workload::Workload;

/// How a call ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// It happened before its end.
    Ok,
    /// It never happened.
    Fail,
    /// It may have happened at any time since its invocation, or may yet: its end says so, or it has none.
    Unknown,
}

/// One thing that a client did, from its invocation to its end. Both are indexes into the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Call {
    pub process: u64,
    pub invoked: usize,
    /// `None` if the history ends before the call does.
    pub ended: Option<usize>,
    pub outcome: Outcome,
}

impl Call {
    /// The index before which it must have happened; none if its outcome is unknown.
    pub fn happened_before(&self) -> Option<usize> {
        self.ended.filter(|_| self.outcome != Outcome::Unknown)
    }
}

/// Why a list of events is no history.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a history: operation {index} of process {process} {what}")]
pub struct Malformed {
    pub index: usize,
    pub process: u64,
    pub what: &'static str,
}

/// A well-formed history: every end has its invocation, and nobody does two things at once.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct History {
    operations: Vec<Operation>,
    calls: Vec<Call>,
}

impl History {
    /// Takes the events in their order, which becomes their index.
    ///
    /// # Errors
    /// The first event that cannot follow on those before it.
    pub fn new(mut operations: Vec<Operation>) -> Result<Self, Malformed> {
        let mut calls: Vec<Call> = Vec::with_capacity(operations.len() / 2);
        let mut open: HashMap<u64, usize> = HashMap::new();
        for (index, operation) in operations.iter_mut().enumerate() {
            operation.index = index as u64;
            let Process::Client(process) = operation.process else { continue };
            let malformed = |what| Malformed { index, process, what };
            match operation.kind {
                Kind::Invoke => {
                    if let Some(&before) = open.get(&process) {
                        return Err(malformed(match calls[before].ended {
                            None => "is invoked before the one before it has ended",
                            Some(_) => "is invoked by a process that is spent: its last outcome was unknown",
                        }));
                    }
                    open.insert(process, calls.len());
                    calls.push(Call { process, invoked: index, ended: None, outcome: Outcome::Unknown });
                }
                kind => {
                    let at = *open.get(&process).ok_or_else(|| malformed("ends without having been invoked"))?;
                    let call = &mut calls[at];
                    if call.ended.is_some() {
                        return Err(malformed("ends a second time"));
                    }
                    call.ended = Some(index);
                    // A process whose outcome is unknown stays in `open`: it is spent.
                    match kind {
                        Kind::Ok => call.outcome = Outcome::Ok,
                        Kind::Fail => call.outcome = Outcome::Fail,
                        Kind::Info | Kind::Invoke => continue,
                    }
                    open.remove(&process);
                }
            }
        }
        Ok(History { operations, calls })
    }

    /// All events, in order.
    pub fn operations(&self) -> &[Operation] {
        &self.operations
    }

    /// What clients did, in the order of invocation.
    pub fn calls(&self) -> &[Call] {
        &self.calls
    }

    /// The event that begins a call.
    pub fn invocation(&self, call: &Call) -> &Operation {
        &self.operations[call.invoked]
    }

    /// The event that ends a call, if there is one.
    pub fn end(&self, call: &Call) -> Option<&Operation> {
        call.ended.map(|index| &self.operations[index])
    }

    /// What a call was about, as far as it is known: as its answer tells it if it succeeded, as it was asked otherwise.
    pub fn action(&self, call: &Call) -> &Action {
        match (call.outcome, self.end(call)) {
            (Outcome::Ok, Some(end)) => &end.action,
            _ => &self.invocation(call).action,
        }
    }

    /// The revision that a call's answer carried.
    pub fn revision(&self, call: &Call) -> Option<u64> {
        self.end(call).and_then(|end| end.revision)
    }

    /// What the nemesis did, with the time in nanoseconds.
    pub fn faults(&self) -> impl Iterator<Item = (u64, &Fault)> {
        self.operations.iter().filter_map(|o| match &o.action {
            Action::Fault(fault) => Some((o.time_ns, fault)),
            _ => None,
        })
    }

    /// The workload of its first operation that has one.
    pub fn workload(&self) -> Option<Workload> {
        self.operations.iter().find_map(|o| o.action.workload())
    }
}
