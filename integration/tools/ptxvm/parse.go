package ptxvm

import (
	"encoding/binary"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// Limits of what a text may declare, so that a bad one cannot take all memory.
const (
	maxRegisters = 1 << 16 // of a kernel
	maxVariable  = 1 << 20 // bytes of a variable
	maxParams    = 4096    // bytes of all parameters
)

// program is a parsed module.
type program struct {
	target    string  // as .target names it
	version   float64 // of the PTX ISA
	variables map[string]*variable
	kernels   map[string]*kernel
	addresses map[string]uint64 // of const and global memory, once loaded
}

// clone has instructions of its own.
func (p *program) clone() *program {
	c := *p
	c.kernels = maps.Clone(p.kernels)
	for name, k := range c.kernels {
		own := *k
		own.code = slices.Clone(k.code)
		c.kernels[name] = &own
	}
	return &c
}

// variable is memory that the text declares.
type variable struct {
	name, space string
	align, size int
	offset      int // in its space; of shared and local memory
	data        []byte
	extern      bool
}

// kernel is a .entry function.
type kernel struct {
	name       string
	params     map[string]*variable
	paramOrder []*variable
	paramBytes int
	maxThreads int
	variables  map[string]*variable
	shared     int // bytes of static shared memory
	local      int // bytes of local memory of a thread
	dynamic    bool
	maxShared  int    // bytes, static and dynamic
	products   bool   // it has wgmma.mma_async
	named      bool   // it has barriers with a number of threads
	banks      [3]int // registers: 32-bit, 64-bit, predicates
	scopes     []map[string]register
	labels     map[string]int
	statements []statement
	code       []inst
	consts     [2]map[uint64]int // slots of immediates, by bank
	specials   map[string]int    // slots of special registers
}

type bank int

const (
	bank32 bank = iota
	bank64
	bankPred
)

type register struct {
	bank bank
	slot int
}

// statement is an instruction as written.
type statement struct {
	line     int
	guard    *register
	negated  bool
	op       string
	operands []operand
}

// operand is a register, an immediate, a name, an address [base+offset], a list {a, b},
// or two registers d|p.
type operand struct {
	reg      *register
	imm      *uint64
	name     string
	address  bool
	offset   int64
	list     []operand
	second   *register
	original string
}

type syntaxError struct {
	line int
	text string
}

func (e *syntaxError) Error() string { return fmt.Sprintf("line %d: %s", e.line, e.text) }

type parser struct {
	tokens []token
	at     int
	p      *program
	k      *kernel // the one whose body is read
}

// parse reads a PTX text.
func parse(text string) (p *program, err error) {
	ps := &parser{tokens: lex(text), p: &program{variables: map[string]*variable{}, kernels: map[string]*kernel{}}}
	defer func() {
		if r := recover(); r != nil {
			e, ok := r.(*syntaxError)
			if !ok {
				panic(r)
			}
			p, err = nil, e
		}
	}()
	for ps.at < len(ps.tokens) {
		ps.directive()
	}
	return ps.p, nil
}

func (ps *parser) fail(format string, args ...any) {
	line := 0
	if n := len(ps.tokens); n > 0 {
		line = ps.tokens[min(ps.at, n-1)].line
	}
	panic(&syntaxError{line, fmt.Sprintf(format, args...)})
}

func (ps *parser) peek() string {
	if ps.at >= len(ps.tokens) {
		return ""
	}
	return ps.tokens[ps.at].text
}

func (ps *parser) next() string {
	if ps.at >= len(ps.tokens) {
		ps.fail("the text ends early")
	}
	ps.at++
	return ps.tokens[ps.at-1].text
}

func (ps *parser) accept(text string) bool {
	if ps.peek() != text {
		return false
	}
	ps.at++
	return true
}

func (ps *parser) expect(text string) {
	if got := ps.next(); got != text {
		ps.at--
		ps.fail("%q; must be %q", got, text)
	}
}

func (ps *parser) integer() int {
	n, err := strconv.ParseInt(ps.next(), 0, 32)
	if err != nil {
		ps.at--
		ps.fail("%q; must be an integer", ps.peek())
	}
	return int(n)
}

// directive reads what may stand outside of kernels.
func (ps *parser) directive() {
	switch word := ps.next(); word {
	case ".version":
		version, err := strconv.ParseFloat(ps.next(), 64)
		if err != nil {
			ps.at--
			ps.fail("version %q; must be a number", ps.peek())
		}
		ps.p.version = version
	case ".target", ".address_size":
		first := ps.next()
		for ps.accept(",") {
			ps.next()
		}
		if word == ".target" {
			ps.p.target = first
		}
	case ".visible", ".weak", ".extern":
		if word == ".extern" {
			ps.variable(ps.p.variables, true)
		}
	case ".entry":
		ps.kernel()
	case ".global", ".const", ".shared":
		ps.at--
		ps.variable(ps.p.variables, false)
	default:
		ps.at--
		ps.fail("directive %q is not known", word)
	}
}

// variable reads a declaration of memory after its linkage, up to the semicolon.
func (ps *parser) variable(into map[string]*variable, extern bool) {
	v := &variable{space: strings.TrimPrefix(ps.next(), "."), align: 1, extern: extern}
	switch v.space {
	case "global", "const", "shared", "local":
	default:
		ps.at--
		ps.fail("memory %q is not known", ps.peek())
	}
	if ps.accept(".align") {
		if v.align = ps.integer(); v.align < 1 || v.align > 1024 || v.align&(v.align-1) != 0 {
			ps.fail("alignment %d; must be a power of two up to 1024", v.align)
		}
	}
	element := typeSize(ps.next())
	if element == 0 {
		ps.at--
		ps.fail("type %q is not known", ps.peek())
	}
	v.name, v.size = ps.next(), element
	for ps.accept("[") {
		n := 0
		if ps.peek() != "]" {
			n = ps.integer()
		}
		ps.expect("]")
		if n < 0 || v.size*n > maxVariable {
			ps.fail("%d elements of %d bytes; must be at most %d bytes", n, v.size, maxVariable)
		}
		v.size *= n
	}
	if ps.accept("=") {
		v.data = ps.initial(element, v.size)
	}
	ps.expect(";")
	if into[v.name] != nil {
		ps.fail("%s is declared twice", v.name)
	}
	into[v.name] = v
}

// initial reads the values of a variable.
func (ps *parser) initial(element, size int) []byte {
	data := make([]byte, 0, size)
	list := ps.accept("{")
	for ps.peek() != "}" {
		imm, ok := immediate(ps.next())
		if !ok {
			ps.at--
			ps.fail("initial value %q is not known", ps.peek())
		}
		var b [8]byte
		binary.LittleEndian.PutUint64(b[:], imm)
		if data = append(data, b[:element]...); len(data) > size {
			ps.fail("more initial values than the variable has room for")
		}
		if !list || !ps.accept(",") {
			break
		}
	}
	if list {
		ps.expect("}")
	}
	return append(data, make([]byte, size-len(data))...)
}

func typeSize(t string) int {
	switch t {
	case ".b8", ".u8", ".s8":
		return 1
	case ".b16", ".u16", ".s16", ".f16":
		return 2
	case ".b32", ".u32", ".s32", ".f32":
		return 4
	case ".b64", ".u64", ".s64", ".f64":
		return 8
	}
	return 0
}

// kernel reads an entry after its keyword.
func (ps *parser) kernel() {
	k := &kernel{
		name: ps.next(), params: map[string]*variable{}, variables: map[string]*variable{}, labels: map[string]int{},
		consts: [2]map[uint64]int{{}, {}}, specials: map[string]int{},
	}
	if ps.p.kernels[k.name] != nil {
		ps.fail("kernel %s is defined twice", k.name)
	}
	ps.k = k
	if ps.accept("(") {
		ps.params()
	}
	for !ps.accept("{") {
		switch word := ps.next(); word {
		case ".maxntid", ".reqntid":
			k.maxThreads = ps.integer()
			for ps.accept(",") {
				k.maxThreads *= ps.integer()
			}
		case ".minnctapersm", ".maxnreg":
			ps.integer()
		default:
			ps.at--
			ps.fail("directive %q is not known", word)
		}
	}
	ps.body()
	ps.p.kernels[k.name] = k
	ps.k = nil
}

func (ps *parser) params() {
	k := ps.k
	for !ps.accept(")") {
		ps.expect(".param")
		v := &variable{space: "param", align: 1}
		if ps.accept(".align") {
			if v.align = ps.integer(); v.align < 1 || v.align > 1024 {
				ps.fail("alignment %d of a parameter", v.align)
			}
		}
		v.size = typeSize(ps.next())
		for ps.peek() == ".ptr" || ps.peek() == ".global" || ps.peek() == ".align" {
			if ps.next() == ".align" {
				ps.integer()
			}
		}
		v.name = ps.next()
		if v.size == 0 || ps.peek() == "[" {
			ps.fail("parameter %s; must be a number or a pointer", v.name)
		}
		v.offset = (k.paramBytes + v.size - 1) / v.size * v.size
		if k.paramBytes = v.offset + v.size; k.paramBytes > maxParams || k.params[v.name] != nil {
			ps.fail("parameter %s: too many, or twice", v.name)
		}
		k.params[v.name] = v
		k.paramOrder = append(k.paramOrder, v)
		ps.accept(",")
	}
}

// body reads declarations, labels, instructions and inner scopes up to the closing brace.
func (ps *parser) body() {
	k := ps.k
	k.scopes = []map[string]register{{}}
	for len(k.scopes) > 0 {
		switch word := ps.next(); {
		case word == "{":
			k.scopes = append(k.scopes, map[string]register{})
		case word == "}":
			k.scopes = k.scopes[:len(k.scopes)-1]
		case word == ";":
		case word == ".reg":
			ps.registers()
		case word == ".shared" || word == ".local":
			ps.at--
			ps.variable(k.variables, false)
		case word == ".pragma":
			ps.next()
			ps.expect(";")
		case word == "@" || isInstruction(word) && ps.peek() != ":":
			ps.at--
			ps.instruction()
		case ps.accept(":"):
			if _, twice := k.labels[word]; twice {
				ps.fail("label %s stands twice", word)
			}
			k.labels[word] = len(k.statements)
		default:
			ps.at--
			ps.fail("%q is not known here", word)
		}
	}
}

func isInstruction(word string) bool { return word[0] >= 'a' && word[0] <= 'z' }

func (ps *parser) registers() {
	k := ps.k
	b := bank32
	switch t := ps.next(); t {
	case ".pred":
		b = bankPred
	default:
		switch typeSize(t) {
		case 2, 4:
		case 8:
			b = bank64
		default:
			ps.at--
			ps.fail("registers of type %q are not known", t)
		}
	}
	declare := func(name string) {
		if k.banks[b] >= maxRegisters {
			ps.fail("more than %d registers", maxRegisters)
		}
		k.scopes[len(k.scopes)-1][name] = register{b, k.banks[b]}
		k.banks[b]++
	}
	for {
		name := ps.next()
		if ps.accept("<") {
			n := ps.integer()
			ps.expect(">")
			if n > maxRegisters {
				ps.fail("more than %d registers", maxRegisters)
			}
			for i := range n {
				declare(name + strconv.Itoa(i))
			}
		} else {
			declare(name)
		}
		if !ps.accept(",") {
			break
		}
	}
	ps.expect(";")
}

func (ps *parser) lookup(name string) *register {
	for i := len(ps.k.scopes) - 1; i >= 0; i-- {
		if r, ok := ps.k.scopes[i][name]; ok {
			return &r
		}
	}
	return nil
}

func (ps *parser) instruction() {
	s := statement{line: ps.tokens[ps.at].line}
	if ps.accept("@") {
		s.negated = ps.accept("!")
		name := ps.next()
		if s.guard = ps.lookup(name); s.guard == nil || s.guard.bank != bankPred {
			ps.fail("guard %q; must be a predicate", name)
		}
	}
	s.op = ps.next()
	for ps.peek() != ";" {
		s.operands = append(s.operands, ps.operand())
		if !ps.accept(",") {
			break
		}
	}
	ps.expect(";")
	ps.k.statements = append(ps.k.statements, s)
}

func (ps *parser) operand() operand {
	switch {
	case ps.accept("{"):
		o := operand{}
		for !ps.accept("}") {
			if ps.peek() == "{" {
				ps.fail("a list in a list")
			}
			o.list = append(o.list, ps.operand())
			ps.accept(",")
		}
		return o
	case ps.accept("["):
		o := ps.operand()
		if o.address || o.list != nil {
			ps.fail("an address of this form is not known")
		}
		o.address = true
		if ps.accept("+") {
			n, err := strconv.ParseInt(ps.next(), 0, 64)
			if err != nil {
				ps.fail("an address of this form is not known")
			}
			o.offset = n
		}
		ps.expect("]")
		return o
	}
	word := ps.next()
	o := operand{original: word}
	if o.reg = ps.lookup(word); o.reg != nil {
		if ps.accept("|") {
			name := ps.next()
			if o.second = ps.lookup(name); o.second == nil {
				ps.fail("register %q is not declared", name)
			}
		}
		return o
	}
	if imm, ok := immediate(word); ok {
		o.imm = &imm
		return o
	}
	if !isWord(word[0]) || word[0] == '%' && !isSpecial(word) {
		ps.at--
		ps.fail("operand %q is not known", word)
	}
	o.name = word
	return o
}

// immediate reads a number: decimal or hexadecimal, 0f and the bits of a float32, 0d and
// those of a float64.
func immediate(word string) (uint64, bool) {
	if len(word) == 10 && (word[:2] == "0f" || word[:2] == "0F") {
		n, err := strconv.ParseUint(word[2:], 16, 32)
		return n, err == nil
	}
	if len(word) == 18 && (word[:2] == "0d" || word[:2] == "0D") {
		n, err := strconv.ParseUint(word[2:], 16, 64)
		return n, err == nil
	}
	if n, err := strconv.ParseInt(word, 0, 64); err == nil {
		return uint64(n), true
	}
	n, err := strconv.ParseUint(word, 0, 64)
	return n, err == nil
}
