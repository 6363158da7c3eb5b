// Package onnxscore scores images with a network in an ONNX file: the reward function
// onnx:NAME.
//
// It takes networks with one input, images [N, 3, H, W] or [N, H, W, 3] in float32 or
// uint8, and one number per image somewhere in the output [N, ...] in float32: aesthetic
// predictors, classifiers, and exports of a CLIP score for one fixed text. The network does
// not get the prompt: a score that depends on it also needs the text encoder of the model,
// so use an http or nats scorer for it.
//
// ONNX Runtime is a C++ library. Programs that are built with cgo and the tag onnx load it
// at the start from the path in LibraryVariable. In all other builds New returns an error
// that says how to build such a program.
package onnxscore

// LibraryVariable is the environment variable with the path of the ONNX Runtime library.
const LibraryVariable = "ONNXRUNTIME_LIB"

// libraryHelp says where to get the library.
const libraryHelp = "libonnxruntime.so of a release at github.com/microsoft/onnxruntime, or of `pip install " +
	"onnxruntime`: " +
	"onnxruntime/capi/libonnxruntime.so.* in the site-packages"
