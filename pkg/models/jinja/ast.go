package jinja

// Expressions.
type (
	expression interface{}
	nameNode   struct {
		name string
		line int
	}
	constNode struct{ value any }
	listNode  struct {
		items []expression
		tuple bool
	}
	dictNode struct{ keys, values []expression }
	condNode struct{ then, test, otherwise expression } // nil otherwise: undefined
	andNode  struct{ left, right expression }
	orNode   struct{ left, right expression }
	notNode  struct{ of expression }
	signNode struct {
		of    expression
		minus bool
	}
	compareNode struct {
		first expression
		ops   []string
		rest  []expression
	}
	binaryNode struct {
		op          string
		left, right expression
		line        int
	}
	concatNode struct{ items []expression }
	attrNode   struct {
		of   expression
		name string
		line int
	}
	itemNode struct {
		of, index expression
		line      int
	}
	sliceNode struct{ begin, end, step expression } // each may be absent
	callNode  struct {
		of   expression
		args arguments
		line int
	}
	filterNode struct {
		of   expression // nil: the text of a block
		name string
		args arguments
		line int
	}
	testNode struct {
		of    expression
		name  string
		args  arguments
		minus bool
		line  int
	}
	arguments struct {
		list  []expression
		names []string
		named []expression
	}
)

// Statements.
type (
	statement  interface{}
	dataNode   struct{ text string }
	outputNode struct {
		of   expression
		line int
	}
	forNode struct {
		target         target
		of, test       expression
		body, none     []statement
		recursive, has bool // has: there is an else
		line           int
	}
	ifNode struct {
		tests  []expression
		bodies [][]statement // one more where there is an else
		line   int
	}
	setNode struct {
		target target
		value  expression
		line   int
	}
	setBlockNode struct {
		target target
		filter expression
		body   []statement
		line   int
	}
	macroNode struct {
		name                   string
		parameters             []string
		defaults               []expression // of the last parameters
		body                   []statement
		caller, named, varargs bool // whether the body uses caller, kwargs, varargs
		line                   int
	}
	callBlockNode struct {
		macro *macroNode
		call  callNode
	}
	filterBlockNode struct {
		filter expression
		body   []statement
	}
	withNode struct {
		names  []string
		values []expression
		body   []statement
	}
	breakNode    struct{}
	continueNode struct{}
)

// target is the left side of an assignment: a name, an attribute of a namespace, or several targets.
type target struct {
	name, attribute string
	several         []target
}
