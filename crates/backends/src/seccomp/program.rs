//! BPF programs: one instruction for each word, in memory layout.

use std::{
    fs::File,
    io::{self, Read, Seek},
};

use codelia_sys::fd;
use libseccomp::{ScmpAction, ScmpArgCompare, ScmpFilterContext, ScmpSyscall};

use super::names::number;
use crate::Error;

/// `BPF_RET` of a constant.
pub(super) const RETURN: u16 = 0x06;
/// `BPF_JA`: jump ahead.
const JUMP: u16 = 0x05;
/// `SECCOMP_RET_ALLOW`.
pub(super) const ALLOW: u32 = 0x7fff_0000;
/// `SECCOMP_RET_KILL_PROCESS`.
const KILL: u32 = 0x8000_0000;
/// `BPF_LD` of a word of the call's description, at an offset.
pub(super) const LOAD: u16 = 0x20;
pub(super) const ARCHITECTURE_OFFSET: u32 = 4;
/// `BPF_JMP` if equal.
pub(super) const JUMP_EQUAL: u16 = 0x15;

/// Adds a rule, unless this machine does not have the call.
pub(super) fn add_rule(
    context: &mut ScmpFilterContext,
    name: &str,
    action: ScmpAction,
    condition: &[ScmpArgCompare],
) -> Result<(), Error> {
    let Some(number) = number(name) else { return Ok(()) };
    context.add_rule_conditional(action, ScmpSyscall::from_raw_syscall(number), condition)?;
    Ok(())
}

/// The program of a context.
pub(super) fn export(context: &ScmpFilterContext) -> Result<Vec<u64>, Error> {
    let mut file = File::from(fd::memfd("filter", b"").map_err(io::Error::from)?);
    context.export_bpf(&file)?;
    file.rewind()?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    Ok(bytes
        .chunks_exact(8)
        .filter_map(|word| word.try_into().ok())
        .map(u64::from_ne_bytes)
        .collect())
}

/// A program that returns what `first` returns, and where that allows, what `second` returns.
pub(super) fn chain(first: &[u64], second: &[u64]) -> Result<Vec<u64>, Error> {
    let mut program = Vec::with_capacity(first.len() + second.len());
    for (index, &word) in first.iter().enumerate() {
        // Instructions are skipped relative to the next one.
        let ahead = u32::try_from(first.len() - index - 1).map_err(io::Error::other)?;
        program.push(if word == instruction(RETURN, ALLOW) {
            instruction(JUMP, ahead)
        } else {
            word
        });
    }
    program.extend(second);
    Ok(program)
}

/// A program that kills for every call. It begins with the architecture, as those of libseccomp do.
pub(super) fn kill_all(architecture: u32) -> [u64; 3] {
    let check = branch(JUMP_EQUAL, architecture, 0, 0);
    [instruction(LOAD, ARCHITECTURE_OFFSET), check, instruction(RETURN, KILL)]
}

/// An instruction without branches.
pub(super) fn instruction(code: u16, constant: u32) -> u64 {
    branch(code, constant, 0, 0)
}

/// An instruction that skips this many others, if its comparison holds and if not.
pub(super) fn branch(code: u16, constant: u32, holds: u8, fails: u8) -> u64 {
    let [low, high] = code.to_ne_bytes();
    let [a, b, c, d] = constant.to_ne_bytes();
    u64::from_ne_bytes([low, high, holds, fails, a, b, c, d])
}

/// The code and the constant of an instruction.
pub(super) fn parts(word: u64) -> (u16, u32) {
    let [low, high, _, _, a, b, c, d] = word.to_ne_bytes();
    (u16::from_ne_bytes([low, high]), u32::from_ne_bytes([a, b, c, d]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allowed_calls_reach_the_second_program() {
        let deny = instruction(RETURN, 0x0005_0001);
        let load = instruction(0x20, 0);
        let first = [load, instruction(RETURN, ALLOW), deny];
        let second = [load, instruction(RETURN, ALLOW)];
        let chained = chain(&first, &second).unwrap();
        assert_eq!(chained, [load, instruction(JUMP, 1), deny, load, instruction(RETURN, ALLOW)]);
    }
}
