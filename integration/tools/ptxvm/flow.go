package ptxvm

import "slices"

// registers are those that an instruction reads and writes.
type registers struct {
	reads  []operand
	writes []register
}

// set is register numbers, over all banks.
type set []uint64

func (s set) add(i int)      { s[i/64] |= 1 << (i % 64) }
func (s set) has(i int) bool { return s[i/64]>>(i%64)&1 != 0 }

// meet keeps what both have, and reports whether that is less than s had.
func (s set) meet(other set) (less bool) {
	for i, x := range other {
		less = less || s[i]&^x != 0
		s[i] &= x
	}
	return less
}

// unset finds a register that is read where, on some way there, nothing has written
// it. A guarded write counts. declared is how many registers each bank has.
func unset(code []inst, used []registers, declared [3]int) (at int, name string) {
	number := func(r register) int {
		n := r.slot
		for b := range int(r.bank) {
			n += declared[b]
		}
		return n
	}
	words := (declared[0]+declared[1]+declared[2])/64 + 1
	before := make([]set, len(code)) // what is written on all ways to an instruction
	work := []int{0}
	before[0] = make(set, words)
	reach := func(i int, after set) {
		switch {
		case i >= len(code):
		case before[i] == nil:
			before[i] = slices.Clone(after)
			work = append(work, i)
		case before[i].meet(after):
			work = append(work, i)
		}
	}
	for len(work) > 0 {
		i := work[len(work)-1]
		work = work[:len(work)-1]
		after := slices.Clone(before[i])
		for _, r := range used[i].writes {
			after.add(number(r))
		}
		in := &code[i]
		if in.control == branch {
			reach(in.target, after)
		}
		if in.control != branch && in.control != exit || in.guard >= 0 {
			reach(i+1, after)
		}
	}
	for i, u := range used {
		for _, o := range u.reads {
			if before[i] != nil && !before[i].has(number(*o.reg)) {
				return i, o.original
			}
		}
	}
	return -1, ""
}
