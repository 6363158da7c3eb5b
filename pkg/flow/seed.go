package flow

import (
	"crypto/sha256"
	"encoding/binary"
	"strconv"
)

// groupIndex replaces the sample index in GroupSeed. No sample has this index.
const groupIndex = ^uint64(0)

// SampleSeed derives the seed of one sample, sampleIndex >= 0: the first 8 bytes, little-endian, of
//
//	SHA-256(le64(len(base)) base le64(len(uid)) uid le64(sampleIndex))
//
// where le64 is 8 bytes little-endian and lengths count bytes. base is SeedBase of
// the prompt's seed or RunBase of its run. schemas/noise.md has vectors.
func SampleSeed(base, uid string, sampleIndex int) uint64 {
	return deriveSeed(base, uid, uint64(sampleIndex))
}

// GroupSeed derives the seed that all samples of a group share, for shared initial noise: SampleSeed with 2^64-1 as
// the index. With the id of a batch as uid it gives the seed of the window draws of that batch.
func GroupSeed(base, uid string) uint64 { return deriveSeed(base, uid, groupIndex) }

// SeedBase is the base of a prompt with a seed of its own: "seed:" and the decimal
// number. The prefix keeps seed 7 apart from a run named "7".
func SeedBase(seed int64) string { return "seed:" + strconv.FormatInt(seed, 10) }

// RunBase is the base of a prompt without a seed: "run:" and the run's name.
func RunBase(run string) string { return "run:" + run }

// deriveSeed is the formula of SampleSeed and GroupSeed: the first 8 bytes, little-endian, of the
// SHA-256 of base, uid and index, with the lengths of both strings, so that no two triples have the
// same bytes. index is that of the sample, or groupIndex for the group.
func deriveSeed(base, uid string, index uint64) uint64 {
	b := make([]byte, 0, 24+len(base)+len(uid))
	b = binary.LittleEndian.AppendUint64(b, uint64(len(base)))
	b = append(b, base...)
	b = binary.LittleEndian.AppendUint64(b, uint64(len(uid)))
	b = append(b, uid...)
	b = binary.LittleEndian.AppendUint64(b, index)
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:])
}
