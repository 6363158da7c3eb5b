package wire

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"

	"github.com/meander-rl/meander/pkg/models/model"
)

// Calls of a worker.
const (
	CallHello    = "hello"
	CallInspect  = "inspect"
	CallEncode   = "encode"
	CallCond     = "condition"
	CallPut      = "put"
	CallVelocity = "velocity"
	CallDecode   = "decode"
	CallEncodeM  = "encode_media"
	CallModules  = "modules"
	CallLoad     = "load"
	CallUnload   = "unload"
	CallMemory   = "memory"
)

// States of a worker.
const (
	Loading = "loading"
	Ready   = "ready"
	Failed  = "failed"
)

// Card is what a worker says of its model: the fields of a card that it knows, and what others are made of.
type Card struct {
	model.Card
	Class  string `msgpack:"class"`
	Latent struct {
		Channels int    `msgpack:"channels"`
		Patch    [3]int `msgpack:"patch"`    // frames, rows, columns of latents in a token
		Scale    int    `msgpack:"scale"`    // edge in pixels of a latent
		Temporal int    `msgpack:"temporal"` // frames of a latent after the first, which is of one
	} `msgpack:"latent"`
	Size         SizeArgs `msgpack:"size"`
	Conditioning []Named  `msgpack:"conditioning"`
	// FramesRule is Latent.Temporal again: frames are 1 more than a multiple of it.
	FramesRule int `msgpack:"frames_rule"`
	// Scheduler is the scheduler_config.json of what is computed in the place of the folder's, JSON; empty: that one.
	Scheduler string `msgpack:"scheduler"`
}

// Named is a tensor of an encoded prompt, with the name of its mask; empty: it has none.
type Named struct {
	Name string `msgpack:"name"`
	Mask string `msgpack:"mask"`
}

// InspectResult is the result of CallInspect.
type InspectResult struct {
	Card Card `msgpack:"card"`
}

// HelloArgs are the arguments of CallHello.
type HelloArgs struct {
	Protocol int    `msgpack:"protocol"`
	Token    string `msgpack:"token"`
}

// Hello is the result of CallHello.
type Hello struct {
	Protocol    int               `msgpack:"protocol"`
	Class       string            `msgpack:"class"`
	Card        Card              `msgpack:"card"`
	Device      string            `msgpack:"device"`
	DType       string            `msgpack:"dtype"`
	Backend     string            `msgpack:"backend"`
	Fingerprint string            `msgpack:"fingerprint"` // of the weights that the worker reads
	Versions    map[string]string `msgpack:"versions"`
	Limits      Limits            `msgpack:"limits"`
	State       string            `msgpack:"state"`
	ImportS     float64           `msgpack:"import_s"` // seconds
	LoadS       float64           `msgpack:"load_s"`   // seconds
	Detail      string            `msgpack:"detail"`
	Error       *Fault            `msgpack:"error"`
}

// Limits bound a frame's body and the rows of a call.
type Limits struct {
	BodyBytes int `msgpack:"body_bytes"`
	Rows      int `msgpack:"rows"`
}

// EncodeArgs are the arguments of CallEncode: the texts of each prompt.
type EncodeArgs struct {
	Prompts  [][]string `msgpack:"prompts"`
	Truncate bool       `msgpack:"truncate"`
}

// Encoded is one item of the result of CallEncode. Tensors are indices.
type Encoded struct {
	Handle  string `msgpack:"handle"`
	Cut     int    `msgpack:"cut"`
	Tensors []int  `msgpack:"tensors"`
}

// EncodeResult is the result of CallEncode.
type EncodeResult struct {
	Items []Encoded `msgpack:"items"`
}

// RecipeArgs are the arguments of CallEncode for a pipeline, and of CallPut the argument recipe: the texts of one
// prompt, digests of conditions by name, scalars by name.
type RecipeArgs struct {
	EncodeArgs
	SizeArgs
	Conditions map[string][]string `msgpack:"conditions"`
	Arguments  map[string]any      `msgpack:"arguments"`
	Guidance   float64             `msgpack:"guidance"`
	Steps      int                 `msgpack:"steps,omitempty"`
}

// PutArgs are the arguments of CallPut: a recipe, or tensors without one.
type PutArgs struct {
	Recipe *RecipeArgs `msgpack:"recipe,omitempty"`
}

// CondArgs are the arguments of CallCond, whose one tensor is u8 [frames, height, width, channels].
type CondArgs struct {
	Digest string `msgpack:"digest"`
	Type   string `msgpack:"type"`
	SizeArgs
}

// DecodeArgs are the arguments of CallDecode; Handle is of a pipeline.
type DecodeArgs struct {
	SizeArgs
	Handle string `msgpack:"handle,omitempty"`
}

// Sound is what the answer of CallDecode says of a sound: how many samples there are in a second; 0: it has none.
type Sound struct {
	Rate int `msgpack:"rate"`
}

// PutResult is the result of CallPut.
type PutResult struct {
	Handle string `msgpack:"handle"`
}

// SizeArgs are the frames and the size in pixels of a sample.
type SizeArgs struct {
	Frames int `msgpack:"frames"`
	Height int `msgpack:"height"`
	Width  int `msgpack:"width"`
}

// VelocityArgs are the arguments of CallVelocity. Weights is empty for the checkpoint. States says which of the states
// sent each row has, where some have the same: rows under guidance come in pairs of one state. Empty: each its own.
type VelocityArgs struct {
	States   []int     `msgpack:"states,omitempty"`
	Sigmas   []float32 `msgpack:"sigmas"`
	Handles  []string  `msgpack:"handles"`
	Guidance []float32 `msgpack:"guidance"`
	Frames   int       `msgpack:"frames"`
	Height   int       `msgpack:"height"`
	Width    int       `msgpack:"width"`
	Weights  string    `msgpack:"weights"`
}

// ModulesResult is the result of CallModules: shapes by name, [n, k] of the linear layers.
type ModulesResult struct {
	Linear  map[string][2]int `msgpack:"linear"`
	Tensors map[string][]int  `msgpack:"tensors"`
}

// Kinds of LoadArgs.
const (
	KindAdapter = "adapter"
	KindWhole   = "whole"
)

// LoadArgs are the arguments of CallLoad.
type LoadArgs struct {
	Weights string   `msgpack:"weights"`
	Kind    string   `msgpack:"kind"`
	Modules []Scaled `msgpack:"modules"`
	Files   []string `msgpack:"files"`
}

// Scaled is the product of an adapter for a module: scale * B A.
type Scaled struct {
	Name  string  `msgpack:"name"`
	Scale float64 `msgpack:"scale"`
	Rank  int     `msgpack:"rank"`
}

// UnloadArgs are the arguments of CallUnload.
type UnloadArgs struct {
	Weights string `msgpack:"weights"`
}

// MemoryResult is the result of CallMemory, in bytes.
type MemoryResult struct {
	Weights  int `msgpack:"weights_bytes"`
	Reserved int `msgpack:"reserved_bytes"`
	Peak     int `msgpack:"peak_bytes"`
}

// Handle returns the name of an encoded prompt: the SHA-256 in hex over its tensors, F32, in the order of the card.
func Handle(tensors []Tensor) string {
	h := sha256.New()
	for _, t := range tensors {
		b := append([]byte(t.Name), 0)
		b = binary.LittleEndian.AppendUint32(b, uint32(len(t.Shape)))
		for _, d := range t.Shape {
			b = binary.LittleEndian.AppendUint32(b, uint32(d))
		}
		h.Write(b)
		h.Write(t.Data)
	}
	return hex.EncodeToString(h.Sum(nil))
}
